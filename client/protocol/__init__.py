"""The wire's structs: items, commands, events and errors, and their JSON codec."""
