"""What ep_fx costs: ``python -m benchmarks`` runs every benchmark; each is a module of its own too."""
