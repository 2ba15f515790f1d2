"""Home Assistant's Wyoming protocol: speech to text over a socket."""
