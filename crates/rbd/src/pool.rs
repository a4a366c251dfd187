//! Pools of a cluster, in which images and objects are.
#![expect(unsafe_code, reason = "calls a library in C")]

use crate::cluster::{Cluster, c_string};
use crate::error::{Errno, RbdError};
use crate::library::{RadosFunctions, rados_ioctx_t};
use std::sync::Arc;

/// A pool, or a namespace in it. Dropping it closes it, and perhaps the connection, which may
/// block.
pub struct Pool {
    handle: rados_ioctx_t,
    cluster: Arc<Cluster>,
}
// SAFETY: librados allows calls from any thread; nothing changes the handle once it is open.
unsafe impl Send for Pool {}
// SAFETY: librados allows calls from any thread, also several at the same time.
unsafe impl Sync for Pool {}

impl Pool {
    /// Opens a pool. May block for ever.
    ///
    /// # Errors
    /// If there is no such pool.
    pub fn open(cluster: &Arc<Cluster>, name: &str, namespace: Option<&str>) -> Result<Pool, RbdError> {
        let rados = &cluster.library.rados;
        let (pool, mut handle) = (c_string("the pool", name)?, std::ptr::null_mut());
        let namespace = namespace.map(|namespace| c_string("the namespace", namespace)).transpose()?;
        // SAFETY: the cluster is connected; a text, and a place for the handle.
        let found = unsafe { (rados.rados_ioctx_create)(cluster.handle, pool.as_ptr(), &raw mut handle) };
        Errno::check(found).map_err(|error| match error.0 {
            libc::ENOENT => RbdError::NoPool(name.to_owned()),
            _ => RbdError::Call { call: "rados_ioctx_create", error },
        })?;
        if let Some(namespace) = namespace {
            // SAFETY: the pool is open; a text.
            unsafe { (rados.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
        }
        Ok(Pool { handle, cluster: cluster.clone() })
    }

    /// The pool of an image that is open by functions that are not librbd's.
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn of_cluster(cluster: Arc<Cluster>) -> Pool {
        Pool { handle: std::ptr::null_mut(), cluster }
    }

    /// The connection.
    #[must_use]
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    pub(crate) fn handle(&self) -> rados_ioctx_t {
        self.handle
    }

    pub(crate) fn rados(&self) -> &'static RadosFunctions {
        &self.cluster.library.rados
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle, and what uses it keeps the pool.
        unsafe { (self.rados().rados_ioctx_destroy)(self.handle) };
    }
}
