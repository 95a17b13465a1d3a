"""HTTP and websockets around sessions."""
