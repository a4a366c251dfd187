//! What a driver is started with, and what it tells.

use blockmux_group::{Client, Incarnation, Settings, Table};
use blockmux_rbd::cluster::{Cluster, ClusterOptions};
use blockmux_rbd::error::RbdError;
use std::sync::Arc;

/// Which member of which group this daemon is.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// The member's name: its own in the group. Another process with this name ends this one.
    pub name: String,
    /// Where initiators and other members reach it.
    pub address: String,
    /// The pool with the group's table.
    pub pool: String,
    /// The namespace in the pool.
    pub namespace: Option<String>,
    /// The object with the group's table.
    pub object: String,
    /// How often things are done.
    pub settings: Settings,
}

/// Makes a new connection to the cluster, which is a client that nobody has had. Called by a thread
/// that may block.
pub type ConnectToCluster = Arc<dyn Fn() -> Result<Cluster, RbdError> + Send + Sync>;

/// Connects to a cluster with these options. `on_start` is called by the thread that connects, from
/// which all threads of the libraries begin.
#[must_use]
pub fn connect_to(cluster: ClusterOptions, on_start: fn()) -> ConnectToCluster {
    Arc::new(move || {
        on_start();
        Cluster::connect(&cluster)
    })
}

/// What a member knows of its group.
#[derive(Clone, Debug, Default)]
pub struct GroupStatus {
    /// The newest table that it knows.
    pub table: Option<Table>,
    /// Its incarnation, while it belongs to the group.
    pub incarnation: Option<Incarnation>,
    /// Its client of the cluster, while it has one.
    pub client: Option<Client>,
    /// Members that are up and that it does not hear.
    pub suspected: Vec<Incarnation>,
    /// What went wrong last, until the table was read again.
    pub problem: Option<String>,
}
