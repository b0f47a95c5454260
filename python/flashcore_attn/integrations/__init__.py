"""FlashCore inside of other libraries. Importing a module of this package imports its library."""
