//! RDMA devices of this machine.
//!
//! | module | what it knows |
//! |---|---|
//! | [`abi`] | the structures and numbers of rdma-core's headers |
//! | [`library`] | rdma-core, loaded at run time |
//! | [`device`] | devices as rdma-core lists them, and what they can do |
//! | [`async_event`] | events of devices, ports and queues that no work causes |
//! | [`connection`] | listeners and connections of librdmacm, with their events |
//! | [`memory`] | registered memory, and windows that open parts of it to peers |
//! | `completion_queue` | work that has completed, and the descriptor that says so |
//! | [`queue_pair`] | work that a device executes, with its completions |
//! | `window_state` | whether a window is bound, in every order in which that becomes known |
//! | [`error`] | which call has failed, and why |
//! | [`kernel`] | devices as the kernel lists them, also without rdma-core |
//! | [`survey`] | both, with what keeps a device from being used |
//!
//! `docs/decisions/0103-rdma-devices-by-rdma-core.md` has the reasons.

pub mod abi;
pub mod async_event;
mod completion_queue;
pub mod connection;
pub mod device;
pub mod error;
pub mod kernel;
pub mod library;
pub mod memory;
pub mod queue_pair;
pub mod survey;
mod window_state;
