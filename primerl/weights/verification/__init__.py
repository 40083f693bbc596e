"""Verification that engines compute with the published weights: the canary and wiring test."""
