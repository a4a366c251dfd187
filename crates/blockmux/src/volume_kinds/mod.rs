//! Opens the volumes of all kinds of specs, and flushes them.

pub(crate) mod flush;
pub(crate) mod image_format;
pub(crate) mod open;
pub(crate) mod opened_twice;
pub(crate) mod records;
pub(crate) mod shared_files;
pub(crate) mod sizes;
