"""Pictures: their bytes, their pixels, and the tokens that stand for them."""
