"""Programs that use the plugin as its users do."""
