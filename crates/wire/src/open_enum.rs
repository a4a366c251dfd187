//! Number types with named values that also represent unknown values.

/// Declares number types with named values. Each is a struct and never a Rust enum, because a peer
/// can send any value.
///
/// `Debug` prints the standard's name of the value, or the type and the number.
macro_rules! open_enum {
    ($(
        $(#[$meta:meta])* pub enum $name:ident($repr:ty) { $($(#[$doc:meta])* $value:ident = $number:expr,)* }
    )*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub $repr);

        impl $name {
            $($(#[$doc])* pub const $value: $name = $name($number);)*

            /// The standard's name of this value, if it has one.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$value => Some(stringify!($value)),)*
                    _ => None,
                }
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, concat!(stringify!($name), "({:#x})"), self.0),
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Debug::fmt(self, f)
            }
        }
    )*};
}
pub(crate) use open_enum;
