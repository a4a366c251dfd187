//! The fuzz targets: functions of a byte slice, which panic if a property does not hold.
//!
//! ```text
//!   fuzz/corpus/NAME/* ──▶ tests/corpus.rs   every input once, in `cargo test`
//!                      ──▶ src/main.rs       mutated at random for a while, on a stable compiler
//!                      ──▶ ../src/main.rs    libFuzzer with coverage and AddressSanitizer, on a nightly one
//! ```
//! To add a target: write a function in a module here, add it to [`TARGETS`], and put a few inputs
//! that reach different branches into `fuzz/corpus/NAME/`. Inputs that have found a bug belong
//! there too, under a name that describes the bug.
#![forbid(unsafe_code)]

mod aoe;
mod choices;
mod group_table;
mod io_count;
mod iscsi_connections;
mod iscsi_initiator;
mod iscsi_requests;
mod iscsi_target;
mod iscsi_target_stream;
mod iser_initiator;
mod iser_target;
mod iwarp;
mod nbd_client_stream;
mod nbd_initiator;
mod nbd_pair;
mod nbd_server_stream;
mod nbd_target;
mod nvme_auth;
mod nvme_rdma_initiator;
mod nvme_rdma_target;
mod nvme_tcp_initiator;
mod nvme_tcp_target;
mod outbox;
mod queue_pair_owner;
mod rdma_target_side;
mod records;
mod requests;
mod roce;
mod roce_port;
mod served;
mod srp_initiator;
mod srp_target;
mod target_side;
mod text;
mod tls;
mod virtio_queue;
mod wire;

pub use io_count::succeeded_io;

/// A fuzz target.
#[derive(Debug)]
pub struct Target {
    /// Its name on the command line, and its directory under `fuzz/corpus`.
    pub name: &'static str,
    /// Panics when a property does not hold for these bytes.
    pub run: fn(&[u8]),
}

/// Every target, in order of name.
pub const TARGETS: &[Target] = &[
    Target { name: "aoe_initiator", run: aoe::aoe_initiator },
    Target { name: "aoe_target", run: aoe::aoe_target },
    Target { name: "aoe_url", run: text::aoe_url },
    Target { name: "fio_job_file", run: text::fio_job_file },
    Target { name: "group_table", run: group_table::group_table },
    Target { name: "iscsi_connections", run: iscsi_connections::iscsi_connections },
    Target { name: "iscsi_initiator", run: iscsi_initiator::iscsi_initiator },
    Target { name: "iscsi_login", run: iscsi_requests::iscsi_login },
    Target { name: "iscsi_target", run: iscsi_target::iscsi_target },
    Target { name: "iscsi_url", run: text::iscsi_url },
    Target { name: "iser_initiator", run: iser_initiator::iser_initiator },
    Target { name: "iser_target", run: iser_target::iser_target },
    Target { name: "iwarp_frames", run: iwarp::iwarp_frames },
    Target { name: "iwarp_peer", run: iwarp::iwarp_peer },
    Target { name: "nbd_initiator", run: nbd_initiator::nbd_initiator },
    Target { name: "nbd_pair", run: nbd_pair::nbd_pair },
    Target { name: "nbd_target", run: nbd_target::nbd_target },
    Target { name: "nbd_uri", run: text::nbd_uri },
    Target { name: "nvme_auth", run: nvme_auth::nvme_auth },
    Target { name: "nvme_rdma_initiator", run: nvme_rdma_initiator::nvme_rdma_initiator },
    Target { name: "nvme_rdma_target", run: nvme_rdma_target::nvme_rdma_target },
    Target { name: "nvme_tcp_initiator", run: nvme_tcp_initiator::nvme_tcp_initiator },
    Target { name: "nvme_tcp_target", run: nvme_tcp_target::nvme_tcp_target },
    Target { name: "nvme_url", run: text::nvme_url },
    Target { name: "outbox", run: outbox::outbox },
    Target { name: "roce_packets", run: roce::roce_packets },
    Target { name: "roce_peer", run: roce::roce_peer },
    Target { name: "roce_port", run: roce_port::roce_port },
    Target { name: "roce_records", run: roce_port::roce_records },
    Target { name: "scsi_commands", run: iscsi_requests::scsi_commands },
    Target { name: "srp_initiator", run: srp_initiator::srp_initiator },
    Target { name: "srp_target", run: srp_target::srp_target },
    Target { name: "srp_url", run: text::srp_url },
    Target { name: "tls", run: tls::tls },
    Target { name: "virtio_queue", run: virtio_queue::virtio_queue },
    Target { name: "volume_spec", run: text::volume_spec },
];

impl Target {
    /// The target of this name, if there is one.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Target> {
        TARGETS.iter().find(|target| target.name == name)
    }
}
