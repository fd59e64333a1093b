"""Predictions beside measurements: error, order, regret, floors."""
