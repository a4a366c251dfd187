//! The process: its log, privileges, signals, files and machine.

pub(crate) mod dead_paths;
pub(crate) mod log;
pub(crate) mod machine;
pub(crate) mod poll;
pub(crate) mod privileges;
pub(crate) mod regular;
pub(crate) mod retry;
pub(crate) mod signals;
pub(crate) mod stdout;
