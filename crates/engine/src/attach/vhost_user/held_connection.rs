//! The connection to a front end, for as long as the guest's memory may be written.

use std::mem::ManuallyDrop;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Keeps the connection of a queue open until its I/O has ended. A front end that is disconnected
/// goes to the next process, which executes requests again and answers them. Then the guest uses
/// their memory for other things, and a late read of this process would overwrite those.
pub(super) struct HeldConnection(ManuallyDrop<Arc<UnixStream>>);

impl HeldConnection {
    /// For a queue that can have I/O from now on.
    pub(super) fn new(connection: Arc<UnixStream>) -> HeldConnection {
        HeldConnection(ManuallyDrop::new(connection))
    }

    /// The I/O of the queue has ended. If it is dropped otherwise, with its core, only the end of
    /// the process ends the I/O, and closes the connection.
    pub(super) fn release(self) {
        drop(ManuallyDrop::into_inner(self.0));
    }
}
