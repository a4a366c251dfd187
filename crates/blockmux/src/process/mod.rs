//! The process: its log, privileges, signals, service manager, files and machine, and the command
//! that it runs.

pub(crate) mod command;
pub(crate) mod dead_paths;
pub(crate) mod log;
pub(crate) mod machine;
pub(crate) mod poll;
pub(crate) mod privileges;
pub(crate) mod regular;
pub(crate) mod retry;
pub(crate) mod service_manager;
pub(crate) mod signals;
pub(crate) mod stdout;
