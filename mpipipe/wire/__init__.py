"""How a bucket looks on the wire."""
