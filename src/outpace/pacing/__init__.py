"""Control of the draft length by measured cost and acceptance."""
