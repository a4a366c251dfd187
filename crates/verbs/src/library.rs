//! rdma-core, loaded at run time: the program also starts where it is not installed.
//!
//! The libraries stay loaded until the process ends, because providers of devices, which they load
//! in turn, do not support being unloaded.
#![allow(clippy::type_complexity, reason = "the types of C's functions")]

use crate::abi::*;
pub use blockmux_dynlib::LibraryError;
use blockmux_dynlib::functions;
use std::ffi::{c_char, c_int, c_uint, c_void};
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

/// The packages of distributions that have rdma-core.
pub const PACKAGES: &str = "rdma-core (Debian: libibverbs1, librdmacm1 and ibverbs-providers)";

functions! {
    /// Functions of libibverbs.
    VerbsFunctions of "libibverbs.so.1\0" in (PACKAGES) {
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
    CmFunctions of "librdmacm.so.1\0" in (PACKAGES) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_is_in_rdma_core() {
        match Library::load() {
            Ok(_) => assert!(std::ptr::eq(Library::load().unwrap(), Library::load().unwrap())),
            Err(error @ LibraryError::NoFunction { .. }) => panic!("{error}"),
            Err(error) => println!("skipped: {error}"),
        }
    }
}
