"""The fast channel's client side: one state machine without I/O, driven by a blocking lane or an event loop."""
