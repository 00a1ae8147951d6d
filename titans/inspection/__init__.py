"""What a memory does along a text: surprise, gates, norms and attention as one page."""
