"""Look for allowed inputs on which an engine is wrong, and reduce what is found to a proof."""
