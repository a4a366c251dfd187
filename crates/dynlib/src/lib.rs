//! Libraries in C, loaded at run time: the program also starts where they are not installed.
//!
//! A library stays loaded until the process ends, because libraries that load others in turn, or
//! have threads, do not support being unloaded.
//!
//! `docs/decisions/0103-rdma-devices-by-rdma-core.md` has the reasons.
#![expect(unsafe_code, reason = "loads libraries in C")]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// A library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// It was not found, or a library that it needs.
    #[error("cannot load {library}: {reason}; install {packages}")]
    NotLoaded {
        /// Its file name.
        library: &'static str,
        /// What the dynamic linker says.
        reason: String,
        /// The packages that have it.
        packages: &'static str,
    },
    /// This program has no dynamic linker.
    #[error(
        "cannot load {library}: this is the static build of blockmux, which loads no libraries; use the dynamic build"
    )]
    StaticProgram {
        /// Its file name.
        library: &'static str,
    },
    /// A function is missing.
    #[error("{library} has no function {function}; install {packages}")]
    NoFunction {
        /// Its file name.
        library: &'static str,
        /// The name of the function.
        function: &'static str,
        /// The packages that have a version with it.
        packages: &'static str,
    },
}

/// Declares a table of a library's functions, with a `load` that finds each by its name. The module
/// needs unsafe code: the types are those of the library's headers.
///
/// ```
/// # #![allow(unsafe_code)]
/// # use std::ffi::c_int;
/// blockmux_dynlib::functions! {
///     /// Functions of the C library.
///     CFunctions of "libc.so.6\0" in ("a C library") {
///         abs(c_int) -> c_int;
///     }
/// }
/// let functions = CFunctions::load().unwrap();
/// // SAFETY: it only computes.
/// assert_eq!(unsafe { (functions.abs)(-3) }, 3);
/// ```
#[macro_export]
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident of $library:literal in ($packages:expr) {
        $($function:ident($($argument:ty),*) $(-> $result:ty)?;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[allow(missing_docs, reason = "the library's manual describes them")]
        pub struct $table {
            $(pub $function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $table {
            /// Loads the library and finds its functions.
            ///
            /// # Errors
            /// If it is not installed, or has not all of them.
            pub fn load() -> Result<$table, $crate::LibraryError> {
                let library = $crate::SharedLibrary::open($library, $packages)?;
                // SAFETY: the functions of these names have these types in the library's headers,
                // and stay loaded.
                unsafe { $table::find(|name| library.function(name)) }
            }

            /// The functions at the addresses that `find` returns for their names, which end with a
            /// zero byte.
            ///
            /// # Errors
            /// The first error of `find`.
            ///
            /// # Safety
            /// Each function has the type of the one of its name, and stays loaded.
            pub unsafe fn find<E>(
                find: impl Fn(&'static str) -> Result<std::ptr::NonNull<std::ffi::c_void>, E>,
            ) -> Result<$table, E> {
                Ok($table {
                    $($function: {
                        let address = find(concat!(stringify!($function), "\0"))?;
                        // SAFETY: as the caller promised.
                        unsafe {
                            std::mem::transmute::<
                                std::ptr::NonNull<std::ffi::c_void>,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(address)
                        }
                    },)*
                })
            }
        }
    };
}

/// A library that is never unloaded.
pub struct SharedLibrary {
    handle: NonNull<c_void>,
    name: &'static str,
    packages: &'static str,
}

impl SharedLibrary {
    /// Loads the library whose file name is `name`, which ends with a zero byte.
    ///
    /// # Errors
    /// If it cannot be loaded, or this program is static; the message says what to do.
    pub fn open(name: &'static str, packages: &'static str) -> Result<SharedLibrary, LibraryError> {
        let file = c_string(name);
        if cfg!(target_feature = "crt-static") {
            // Its `dlopen` would say that loading is not supported, but not why, nor what to do.
            return Err(LibraryError::StaticProgram { library: name.trim_end_matches('\0') });
        }
        // SAFETY: the name ends with a zero byte. The initializers of the libraries that this
        // program names only set their own variables.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let name = name.trim_end_matches('\0');
        NonNull::new(handle)
            .map(|handle| SharedLibrary { handle, name, packages })
            .ok_or_else(|| LibraryError::NotLoaded { library: name, reason: linker_error(name), packages })
    }

    /// The address of the default version of a function; `name` ends with a zero byte.
    ///
    /// # Errors
    /// If the library does not have it.
    pub fn function(&self, name: &'static str) -> Result<NonNull<c_void>, LibraryError> {
        // SAFETY: the library is loaded, and the name ends with a zero byte.
        let address = unsafe { libc::dlsym(self.handle.as_ptr(), c_string(name).as_ptr()) };
        let function = name.trim_end_matches('\0');
        let (library, packages) = (self.name, self.packages);
        NonNull::new(address).ok_or(LibraryError::NoFunction { library, function, packages })
    }
}

/// The message of the dynamic linker, without the library's name, which it may begin with.
fn linker_error(library: &str) -> String {
    // SAFETY: it has no arguments, and returns a message of this thread.
    let Some(message) = NonNull::new(unsafe { libc::dlerror() }) else {
        return "the dynamic linker gives no reason".to_owned();
    };
    // SAFETY: a text that is valid until this thread calls the linker again, and copied before.
    let message = unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy();
    message.strip_prefix(library).map_or(&*message, |rest| rest.trim_start_matches(": ")).to_owned()
}

fn c_string(name: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(name.as_bytes()).expect("a literal that ends with its only zero byte")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKAGES: &str = "a package (Debian: its name)";

    #[test]
    fn a_library_that_is_not_there_is_named_with_its_package() {
        let Err(error) = SharedLibrary::open("libblockmux-none.so.1\0", PACKAGES) else {
            panic!("it exists")
        };
        let text = error.to_string();
        assert!(text.starts_with("cannot load libblockmux-none.so.1: cannot open shared object"), "{text}");
        assert!(text.ends_with("; install a package (Debian: its name)"), "{text}");
    }

    #[test]
    fn a_static_program_names_the_reason_and_the_remedy() {
        let error = LibraryError::StaticProgram { library: "libibverbs.so.1" };
        assert_eq!(
            error.to_string(),
            "cannot load libibverbs.so.1: this is the static build of blockmux, which loads no libraries; use the \
             dynamic build"
        );
    }

    #[test]
    fn a_function_that_is_not_there_is_named() {
        let library = SharedLibrary::open("libc.so.6\0", PACKAGES).unwrap();
        assert!(library.function("dlopen\0").is_ok());
        let error = library.function("ibv_none\0").unwrap_err();
        let (library, function, packages) = ("libc.so.6", "ibv_none", PACKAGES);
        assert_eq!(error, LibraryError::NoFunction { library, function, packages });
    }
}
