//! Every protocol under the simulator: hundreds of seeds with each kind of fault.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim nbd`
//! runs only that seed, over NBD, with every kind of fault.

mod aoe;
mod fairness;
mod iscsi;
mod iscsi_paths;
mod iser;
mod nbd;
mod nvme;
mod nvme_paths;
mod nvme_rdma;
mod resize;
mod roce;
mod scenarios;
mod seeds;
mod shared_volume;
#[path = "../sides/mod.rs"]
mod sides;
mod silence;
mod srp;
mod two_paths;
