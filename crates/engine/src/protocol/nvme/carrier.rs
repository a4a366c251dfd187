//! The transports of an NVMe host: TCP and RDMA.

use crate::fabric::{OverIwarp, Setup};
use blockmux_proto::driver::session::{
    Control, Initiator, Overdue, PathRank, RetryRules, StreamConnections, StreamSession,
};
use blockmux_proto::fabrics::host::{AdminConfig, AdminResults, NvmeRefused, QueueConfig};
use blockmux_proto::{nvme_rdma, nvme_tcp};
use blockmux_rdma::iwarp::Iwarp;
use blockmux_rdma::{Driven, Seed};
use blockmux_volume::Pool;
use std::time::Instant;

/// The transport of an NVMe host's queues.
pub trait NvmeCarrier: Clone + Send + Sync + 'static {
    /// A session with an admin queue.
    type Admin: Control + StreamSession + 'static;
    /// A session with the I/O queues of one namespace.
    type Queues: Initiator + Overdue + StreamConnections + 'static;

    /// Creates an admin queue for a new connection.
    fn admin(&self, config: AdminConfig, with: QueueSetup) -> Self::Admin;

    /// Creates the I/O queues; the first one is for a new connection.
    fn queues(&self, config: QueueConfig, retries: RetryRules, with: QueueSetup) -> Self::Queues;

    /// The results of the admin queue's commands.
    fn answers(admin: &Self::Admin) -> AdminResults<'_>;

    /// Sets the rank of the queues' path
    /// ([`blockmux_proto::fabrics::host::HostQueues::set_path_rank`]).
    fn set_path_rank(queues: &mut Self::Queues, rank: PathRank);

    /// Why the controller refused the queues
    /// ([`blockmux_proto::fabrics::host::HostQueues::refused`]).
    fn refused(queues: &Self::Queues) -> Option<&NvmeRefused>;

    /// The transport in its oldest variant, for controllers that support no other. `None` if this
    /// is the oldest variant.
    fn older(&self) -> Option<Self> {
        None
    }

    /// Whether the admin queue may have failed because the controller supports only the oldest
    /// variant.
    fn may_require_revision_1(_admin: &Self::Admin) -> bool {
        false
    }
}

/// Parameters of new queues.
pub struct QueueSetup {
    /// The core's pool.
    pub pool: Pool,
    /// Seed for memory region keys: random and unique.
    pub seed: Seed,
    /// Maximum segment size of the connection in bytes, if known.
    pub segment_len: Option<usize>,
    /// The current time.
    pub now: Instant,
}

impl QueueSetup {
    fn for_rdma(self) -> Setup {
        let QueueSetup { pool, seed, segment_len, now } = self;
        Setup { pool, seed, segment_len, now }
    }
}

/// NVMe/TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct NvmeOverTcp {
    /// The digests to request.
    pub digests: nvme_tcp::client::Digests,
}

impl NvmeCarrier for NvmeOverTcp {
    type Admin = nvme_tcp::client::NvmeTcpAdminSession;
    type Queues = nvme_tcp::client::NvmeTcpQueueSession;

    fn admin(&self, config: AdminConfig, with: QueueSetup) -> Self::Admin {
        Self::Admin::new(config, self.digests, with.pool, with.now)
    }

    fn queues(&self, config: QueueConfig, retries: RetryRules, with: QueueSetup) -> Self::Queues {
        let session = Self::Queues::new(config, self.digests, with.pool, with.now);
        session.with_retries(retries)
    }

    fn answers(admin: &Self::Admin) -> AdminResults<'_> {
        admin.answers()
    }

    fn set_path_rank(queues: &mut Self::Queues, rank: PathRank) {
        queues.set_path_rank(rank);
    }

    fn refused(queues: &Self::Queues) -> Option<&NvmeRefused> {
        queues.refused()
    }
}

impl NvmeCarrier for OverIwarp {
    type Admin = Driven<Iwarp, nvme_rdma::client::NvmeRdmaAdminSession>;
    type Queues = Driven<Iwarp, nvme_rdma::client::NvmeRdmaQueueSession>;

    fn admin(&self, config: AdminConfig, with: QueueSetup) -> Self::Admin {
        let session = nvme_rdma::client::NvmeRdmaAdminSession::new(config, (), with.pool.clone(), with.now);
        self.connect(session, with.for_rdma())
    }

    fn queues(&self, config: QueueConfig, retries: RetryRules, with: QueueSetup) -> Self::Queues {
        let session = nvme_rdma::client::NvmeRdmaQueueSession::new(config, (), with.pool.clone(), with.now);
        let session = session.with_retries(retries);
        self.connect_several(session, with.for_rdma())
    }

    fn answers(admin: &Self::Admin) -> AdminResults<'_> {
        admin.session().answers()
    }

    fn set_path_rank(queues: &mut Self::Queues, rank: PathRank) {
        queues.session_mut().set_path_rank(rank);
    }

    fn refused(queues: &Self::Queues) -> Option<&NvmeRefused> {
        queues.session().refused()
    }
    fn older(&self) -> Option<OverIwarp> {
        OverIwarp::older(*self)
    }

    fn may_require_revision_1(admin: &Self::Admin) -> bool {
        admin.queue_pair().may_require_revision_1()
    }
}
