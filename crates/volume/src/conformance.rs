//! The suite that every volume must pass.
