//! Tests of the built program: its command line, its daemons, and other implementations as peers.
//!
//! A test that needs a program which is not installed prints a line that begins with `skipped: `
//! and ends.
#![forbid(unsafe_code)]

mod access;
mod aliases;
mod allow;
mod aoe_interop;
mod api;
mod audit;
mod bad_input;
mod bench;
mod block_sizes;
mod config;
mod control;
mod copy;
mod daemon;
mod data_loss;
mod device_flush;
mod durability;
mod fencing;
mod foreign_links;
mod hanging;
mod hostile;
mod identity;
mod idle;
mod image_files;
mod interop;
mod iscsi_conformance;
mod iscsi_interop;
mod iscsi_remote_servers;
mod iscsi_stop;
mod iser;
mod limits;
mod memory;
mod monitoring;
mod names;
mod nbd_tls;
mod nvme;
mod nvme_hostile;
mod nvme_hosts;
mod nvme_rdma;
mod nvme_spdk;
mod nvme_tls;
mod one_volume;
mod privileges;
mod program;
mod proxy;
mod raw_client;
mod raw_iscsi;
mod raw_nvme;
mod reconnect;
mod reload;
mod remote_servers;
mod rotation;
mod secrets;
mod serve;
mod service;
mod slices;
mod srp;
mod takeover;
mod timeouts;
mod token_copy;
mod trouble;
mod zones;
