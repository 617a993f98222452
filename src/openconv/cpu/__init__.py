"""CPU: the runtime and one file per engine. Engines are imported at the first choice, not with the package."""
