//! Byte layouts: structures whose bytes are exactly those of a protocol.

/// Declares structures of a protocol, each with its size in bytes: `repr(C)`, readable from and
/// writable as bytes at any address, and checked for padding and size at compile time.
///
/// A field with `= 0` is reserved: senders set it to 0, receivers ignore it.
macro_rules! layout {
    ($($declarations:tt)*) => {
        $crate::layout::structures! { #[derive(zerocopy::Unaligned)] $($declarations)* }
    };
}
pub(crate) use layout;

/// Declares structures that a program shares with the kernel or another program of this machine:
/// as [`layout!`] does, but with numbers in the machine's byte order, aligned, and with defaults.
macro_rules! native_layout {
    ($($declarations:tt)*) => {
        $crate::layout::structures! { #[derive(Default)] $($declarations)* }
    };
}
pub(crate) use native_layout;

macro_rules! structures {
    (#[$derive:meta] $($(#[$meta:meta])* pub struct $name:ident($size:expr) {
        $($(#[$doc:meta])* pub $field:ident: $type:ty $(= $zero:literal)?,)*
    })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)]
        #[$derive]
        #[repr(C)]
        pub struct $name {
            $($(#[$doc])* $(#[doc(hidden)] #[doc = concat!("Reserved: ", $zero)])? pub $field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}
pub(crate) use structures;
