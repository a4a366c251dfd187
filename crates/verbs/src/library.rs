//! rdma-core, loaded at run time: the program also starts where it is not installed.
//!
//! The libraries stay loaded until the process ends, because providers of devices, which they load
//! in turn, do not support being unloaded.
#![expect(unsafe_code, reason = "loads libraries in C, and gives their functions types")]
#![allow(clippy::type_complexity, reason = "the types of C's functions")]

use crate::abi::*;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

/// The functions of rdma-core.
#[derive(Clone, Copy)]
pub struct Library {
    /// Devices, memory and queues.
    pub verbs: VerbsFunctions,
    /// Connections.
    pub cm: CmFunctions,
}

impl Library {
    /// Loads rdma-core, or returns it if it is loaded already. A later call finds what was
    /// installed after one that failed.
    ///
    /// # Errors
    /// If it is not installed, or this program is static; the message says what to do.
    pub fn load() -> Result<&'static Library, LibraryError> {
        static LOADED: OnceLock<Library> = OnceLock::new();
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        let library = Library { verbs: VerbsFunctions::load()?, cm: CmFunctions::load()? };
        Ok(LOADED.get_or_init(|| library))
    }
}

/// rdma-core cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// A library was not found, or one that it needs.
    #[error("cannot load {library}: {reason}; install {PACKAGES}")]
    NotLoaded {
        /// Its file name.
        library: &'static str,
        /// What the dynamic linker says.
        reason: String,
    },
    /// This program has no dynamic linker.
    #[error(
        "cannot load {library}: this is the static build of blockmux, which loads no libraries; use the dynamic build"
    )]
    StaticProgram {
        /// Its file name.
        library: &'static str,
    },
    /// A function that has been there since 2007 is missing.
    #[error("{library} has no function {function}; install {PACKAGES}")]
    NoFunction {
        /// Its file name.
        library: &'static str,
        /// The name of the function.
        function: &'static str,
    },
}

/// The packages of distributions that have rdma-core.
pub const PACKAGES: &str = "rdma-core (Debian: libibverbs1, librdmacm1 and ibverbs-providers)";

/// Declares a table of a library's functions, with a `load` that finds each by its name.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident of $library:literal {
        $($function:ident($($argument:ty),*) $(-> $result:ty)?;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[allow(missing_docs, reason = "the manual pages of rdma-core describe them")]
        pub struct $table {
            $(pub $function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $table {
            fn load() -> Result<$table, LibraryError> {
                let library = SharedLibrary::open($library)?;
                Ok($table {
                    $($function: {
                        let address = library.function(concat!(stringify!($function), "\0"))?;
                        // SAFETY: the function of this name has this type in the library's
                        // headers, and stays loaded.
                        unsafe {
                            std::mem::transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(address)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    /// Functions of libibverbs.
    VerbsFunctions of "libibverbs.so.1\0" {
        ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list(*mut *mut ibv_device);
        ibv_open_device(*mut ibv_device) -> *mut ibv_context;
        ibv_close_device(*mut ibv_context) -> c_int;
        ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        ibv_get_async_event(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ibv_ack_async_event(*mut ibv_async_event);
        ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd(*mut ibv_pd) -> c_int;
        ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        ibv_dereg_mr(*mut ibv_mr) -> c_int;
        ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
        ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_destroy_cq(*mut ibv_cq) -> c_int;
        ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events(*mut ibv_cq, c_uint);
        ibv_wc_status_str(c_uint) -> *const c_char;
    }
}

functions! {
    /// Functions of librdmacm.
    CmFunctions of "librdmacm.so.1\0" {
        rdma_create_event_channel() -> *mut rdma_event_channel;
        rdma_destroy_event_channel(*mut rdma_event_channel);
        rdma_get_cm_event(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
        rdma_ack_cm_event(*mut rdma_cm_event) -> c_int;
        rdma_create_id(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, c_int) -> c_int;
        rdma_destroy_id(*mut rdma_cm_id) -> c_int;
        rdma_migrate_id(*mut rdma_cm_id, *mut rdma_event_channel) -> c_int;
        rdma_set_option(*mut rdma_cm_id, c_int, c_int, *mut c_void, usize) -> c_int;
        rdma_bind_addr(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
        rdma_listen(*mut rdma_cm_id, c_int) -> c_int;
        rdma_resolve_addr(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        rdma_resolve_route(*mut rdma_cm_id, c_int) -> c_int;
        rdma_create_qp(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
        rdma_destroy_qp(*mut rdma_cm_id);
        rdma_connect(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        rdma_accept(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        rdma_reject(*mut rdma_cm_id, *const c_void, u8) -> c_int;
        rdma_disconnect(*mut rdma_cm_id) -> c_int;
        rdma_get_src_port(*mut rdma_cm_id) -> u16;
        rdma_get_dst_port(*mut rdma_cm_id) -> u16;
    }
}

/// A library that is never unloaded.
struct SharedLibrary {
    handle: NonNull<c_void>,
    name: &'static str,
}

impl SharedLibrary {
    /// `name` ends with a zero byte.
    fn open(name: &'static str) -> Result<SharedLibrary, LibraryError> {
        let file = c_string(name);
        if cfg!(target_feature = "crt-static") {
            // Its `dlopen` would say that loading is not supported, but not why, nor what to do.
            return Err(LibraryError::StaticProgram { library: name.trim_end_matches('\0') });
        }
        // SAFETY: the name ends with a zero byte. The initializers of rdma-core only set its own
        // variables.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let name = name.trim_end_matches('\0');
        NonNull::new(handle)
            .map(|handle| SharedLibrary { handle, name })
            .ok_or_else(|| LibraryError::NotLoaded { library: name, reason: linker_error(name) })
    }

    /// The address of the default version of a function; `name` ends with a zero byte.
    fn function(&self, name: &'static str) -> Result<NonNull<c_void>, LibraryError> {
        // SAFETY: the library is loaded, and the name ends with a zero byte.
        let address = unsafe { libc::dlsym(self.handle.as_ptr(), c_string(name).as_ptr()) };
        let function = name.trim_end_matches('\0');
        NonNull::new(address).ok_or(LibraryError::NoFunction { library: self.name, function })
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

    #[test]
    fn a_library_that_is_not_there_is_named_with_its_package() {
        let Err(error) = SharedLibrary::open("libblockmux-none.so.1\0") else { panic!("it exists") };
        let text = error.to_string();
        assert!(text.starts_with("cannot load libblockmux-none.so.1: cannot open shared object"), "{text}");
        assert!(
            text.ends_with("; install rdma-core (Debian: libibverbs1, librdmacm1 and ibverbs-providers)")
        );
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
        let library = SharedLibrary::open("libc.so.6\0").unwrap();
        assert!(library.function("dlopen\0").is_ok());
        let error = library.function("ibv_none\0").unwrap_err();
        assert_eq!(error, LibraryError::NoFunction { library: "libc.so.6", function: "ibv_none" });
    }

    #[test]
    fn every_function_is_in_rdma_core() {
        match Library::load() {
            Ok(_) => assert!(std::ptr::eq(Library::load().unwrap(), Library::load().unwrap())),
            Err(error @ LibraryError::NoFunction { .. }) => panic!("{error}"),
            Err(error) => println!("skipped: {error}"),
        }
    }
}
