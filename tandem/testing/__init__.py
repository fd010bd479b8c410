"""Seeded models and doubles for tests of Tandem and of code built on it."""
