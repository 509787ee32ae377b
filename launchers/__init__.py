"""Ways to start ranks. Standard library only: nothing here imports torch."""
