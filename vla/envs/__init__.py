"""Robots that exist in numbers only, behind the same protocol as real ones."""
