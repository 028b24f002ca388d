"""The implementation. Nothing here is public: `eformer` and its packages offer what is."""
