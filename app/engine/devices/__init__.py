"""Local devices: numpy (the readable reference), cpu (native), cuda."""
