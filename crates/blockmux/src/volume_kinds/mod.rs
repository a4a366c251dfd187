//! Opens the volumes of all kinds of specs.

pub(crate) mod image_format;
pub(crate) mod open;
mod records;
mod shared_files;
