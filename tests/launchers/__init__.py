"""Tests of the launchers package."""
