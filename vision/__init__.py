"""Sight: load pictures and clips, and turn their pixels into visual tokens."""
