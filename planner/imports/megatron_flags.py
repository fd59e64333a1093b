"""Flags of Megatron-LM's trainers that a strategy has a word for, or none.

Every one is a flag of the parser of core 0.19.2 (``.ci/exporters/check_megatron.py``).
"""

from __future__ import annotations

__all__ = ["IGNORED", "SWITCHES"]

#: Flags without a value that mean something to a strategy.
SWITCHES = (
    "sequence-parallel",
    "use-distributed-optimizer",
    "use-megatron-fsdp",
    "use-torch-fsdp2",
    "bf16",
    "fp16",
    "grad-reduce-in-bf16",
    "recompute-activations",
    "torch-fsdp2-no-reshard-after-forward",
)


def _because(why: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


#: Flags that mean nothing to it, and why.
IGNORED: dict[str, str] = {
    **_because(
        "the model's own, which --model names",
        "hidden-size ffn-hidden-size num-attention-heads kv-channels seq-length "
        "group-query-attention num-query-groups max-position-embeddings "
        "vocab-size make-vocab-size-divisible-by position-embedding-type "
        "use-rotary-position-embeddings rotary-base rotary-percent normalization "
        "norm-epsilon swiglu squared-relu untie-embeddings-and-output-weights "
        "disable-bias-linear add-qkv-bias attention-dropout hidden-dropout "
        "init-method-std num-experts moe-router-topk moe-ffn-hidden-size "
        "moe-layer-freq qk-layernorm rotary-scaling-factor use-rope-scaling "
        "apply-layernorm-1p encoder-num-layers encoder-seq-length "
        "decoder-seq-length multi-latent-attention spec "
        "moe-shared-expert-intermediate-size moe-shared-expert-gate "
        "moe-router-score-function moe-router-enable-expert-bias "
        "moe-router-bias-update-rate moe-router-num-groups moe-router-group-topk "
        "moe-router-pre-softmax moe-router-topk-scaling-factor q-lora-rank "
        "kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim window-size",
    ),
    **_because(
        "data and tokenizer",
        "data-path split tokenizer-type tokenizer-model vocab-file merge-file "
        "mock-data data-cache-path num-workers dataloader-type train-data-path "
        "valid-data-path reset-position-ids reset-attention-mask eod-mask-loss "
        "no-create-attention-mask-in-dataloader no-mmap-bin-files",
    ),
    **_because(
        "how long is trained, and how the rate changes",
        "train-iters train-samples exit-interval exit-duration-in-mins "
        "lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-iters "
        "lr-warmup-fraction lr-warmup-samples min-lr eval-interval eval-iters "
        "seed lr-warmup-init start-weight-decay end-weight-decay "
        "weight-decay-incr-style",
    ),
    **_because(
        "checkpoints and logs",
        "save load save-interval ckpt-format async-save no-save-optim "
        "no-save-rng no-load-optim no-load-rng finetune log-interval "
        "tensorboard-dir log-throughput wandb-project wandb-exp-name "
        "wandb-save-dir log-params-norm log-num-zeros-in-grad "
        "log-timers-to-tensorboard log-memory-to-tensorboard "
        "log-validation-ppl-to-tensorboard timing-log-level "
        "tensorboard-queue-size tensorboard-log-interval log-progress "
        "dist-ckpt-strictness auto-detect-ckpt-format profile profile-step-start "
        "profile-step-end profile-ranks wandb-entity use-pytorch-profiler "
        "use-checkpoint-args use-checkpoint-opt-param-scheduler ckpt-step "
        "ckpt-fully-parallel-load ckpt-fully-parallel-save "
        "ckpt-assume-constant-structure use-dist-ckpt log-device-memory-used "
        "log-world-size-to-tensorboard log-energy log-straggler "
        "moe-per-layer-logging no-one-logger",
    ),
    **_because(
        "kernels; Meshwright prices torch's",
        "use-flash-attn attention-backend transformer-impl "
        "no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion "
        "no-bias-dropout-fusion no-rope-fusion no-gradient-accumulation-fusion "
        "cross-entropy-loss-fusion use-mcore-models no-persist-layer-norm "
        "cross-entropy-fusion-impl apply-query-key-layer-scaling "
        "attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32 "
        "moe-grouped-gemm deterministic-mode manual-gc manual-gc-interval "
        "moe-router-fusion moe-permute-fusion moe-router-padding-for-fp8 "
        "fp8-recipe fp8-margin fp8-amax-history-len fp8-amax-compute-algo "
        "no-check-for-nan-in-loss-and-grad",
    ),
    **_because(
        "communication that Meshwright overlaps by itself",
        "overlap-grad-reduce overlap-param-gather tp-comm-overlap "
        "overlap-param-gather-with-optimizer-step no-overlap-p2p-communication "
        "overlap-p2p-communication-warmup-flush no-align-grad-reduce "
        "disable-align-grad-reduce no-align-param-gather tp-comm-overlap-cfg "
        "tp-comm-bootstrap-backend overlap-moe-expert-parallel-comm "
        "delay-wgrad-compute moe-shared-expert-overlap moe-enable-deepep "
        "moe-flex-dispatcher-backend use-nccl-ub ddp-average-in-collective "
        "ddp-pad-buckets-for-high-nccl-busbw moe-token-dispatcher-type "
        "moe-aux-loss-coeff moe-router-load-balancing-type moe-router-dtype "
        "moe-token-drop-policy moe-expert-capacity-factor "
        "moe-pad-expert-input-to-capacity",
    ),
    **_because(
        "arithmetic of the optimizer",
        "adam-beta1 adam-beta2 adam-eps loss-scale initial-loss-scale "
        "min-loss-scale loss-scale-window hysteresis",
    ),
    **_because(
        "how processes are started",
        "distributed-backend distributed-timeout-minutes local-rank "
        "lazy-mpu-init use-cpu-initialization nccl-communicator-config-path "
        "enable-experimental",
    ),
    "recompute-modules": "which ops selective recomputes; attention is priced",
    "use-tp-pp-dp-mapping": "another order of ranks; tp-cp-ep-dp-pp is priced",
    "exit-on-missing-checkpoint": "checkpoints and logs",
    "rampup-batch-size": "the batch that it grows to is priced",
    "outer-dp-sharding-strategy": "replicas of a shard hold all of it",
    "use-precision-aware-optimizer": "states and gradients of float32 are priced",
    "fp8-param-gather": "weights are gathered in what --bf16 or --fp16 says",
}
