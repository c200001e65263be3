"""One file per `general.architecture`: hyperparameters, tensor names, graph."""
