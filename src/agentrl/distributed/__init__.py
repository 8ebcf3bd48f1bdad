"""One model over many processes: which process holds what, and how their gradients become one step's."""
