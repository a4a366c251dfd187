//! Converts a queue whose connection turns out to use another transport than it was created for.

use super::connect::HostConnection;
use super::node::NvmeNode;
use super::{ControllerQueue, FabricsTransport};

impl<T: FabricsTransport> ControllerQueue<T> {
    /// Converts the queue to another transport; it must not have received anything yet.
    pub(crate) fn change_transport<U: FabricsTransport>(
        self,
        make: impl FnOnce(&NvmeNode) -> U,
    ) -> ControllerQueue<U> {
        let mut queue =
            ControllerQueue::with_transport(make(&self.node), self.node, self.pool, self.timers.now);
        queue.connection = HostConnection { sgls: U::SGLS, ..self.connection };
        (queue.timers, queue.unstarted, queue.stopping) = (self.timers, self.unstarted, self.stopping);
        queue.outlasts_io_queues = self.outlasts_io_queues;
        (queue.is_over, queue.make_notifier) = (self.is_over, self.make_notifier);
        queue
    }
}
