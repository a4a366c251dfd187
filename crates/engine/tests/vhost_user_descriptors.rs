//! Front ends of a disk by vhost-user whose descriptors could block the core that uses them.

#[allow(dead_code, reason = "other tests use the rest")]
mod back_ends;
#[allow(dead_code, reason = "other tests use the rest")]
mod fake_front_end;

use back_ends::BackEnds;
use blockmux_volume::MemVolume;
use blockmux_wire::virtio::Features;
use blockmux_wire::virtio::vhost_user::{FrontendRequest, VringState};
use fake_front_end::{FrontEnd, Guest, MEMORY, QUEUE, memory_table};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{ioctl_fionbio, write};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

#[test]
fn event_descriptors_that_block_do_not_block_a_core() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let (front_end, guest) = (FrontEnd::connect(&back_ends.path("disk")), Guest::new());
    // A core that blocks keeps the thread of the socket, too.
    front_end.socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let accepted = Features::VERSION_1 | Features::VHOST_USER_PROTOCOL_FEATURES;
    front_end.tell(FrontendRequest::SET_FEATURES, accepted.bits().as_bytes());
    front_end.tell_with(FrontendRequest::SET_MEM_TABLE, &memory_table(MEMORY), &guest.memory);
    let state = |num| VringState { index: 0, num };
    front_end.tell(FrontendRequest::SET_VRING_NUM, state(QUEUE).as_bytes());
    front_end.tell(FrontendRequest::SET_VRING_ADDR, Guest::place(0).as_bytes());
    let [call, kick] = [FrontendRequest::SET_VRING_CALL, FrontendRequest::SET_VRING_KICK].map(|request| {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        front_end.tell_with(request, &[0; 8], &event);
        event
    });
    front_end.tell(FrontendRequest::SET_VRING_ENABLE, state(1).as_bytes());
    assert!(front_end.is_served());
    // The back end has no flags of its own.
    [&call, &kick].into_iter().for_each(|event| ioctl_fionbio(event, false).unwrap());
    // The driver was notified when the queue began, by 1. Now no more can be added.
    write(&call, &(u64::MAX - 2).to_ne_bytes()).unwrap();
    guest.request(0, 0, false, 0);
    write(&kick, &1_u64.to_ne_bytes()).unwrap();
    while guest.answered(0) == 0 {
        assert!(front_end.is_served());
    }
    // Each makes the core look for notifications, of which there is none.
    for _ in 0..3 {
        front_end.tell(FrontendRequest::SET_VRING_ENABLE, state(1).as_bytes());
        assert!(front_end.is_served(), "the core blocks");
    }
}

#[test]
fn descriptors_that_could_block_are_refused() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let (reader, writer) = std::io::pipe().unwrap();
    // Its pages come from another file system, as those of a front end's own FUSE server would.
    let file = File::open("/proc/self/status").unwrap();
    let table = memory_table(MEMORY);
    for (request, payload, fd) in [
        (FrontendRequest::SET_VRING_KICK, &[0; 8][..], reader.as_fd()),
        (FrontendRequest::SET_VRING_CALL, &[0; 8], writer.as_fd()),
        (FrontendRequest::SET_VRING_ERR, &[0; 8], writer.as_fd()),
        (FrontendRequest::SET_BACKEND_REQ_FD, &[], writer.as_fd()),
        (FrontendRequest::SET_MEM_TABLE, &table, file.as_fd()),
    ] {
        let front_end = FrontEnd::connect(&back_ends.path("disk"));
        front_end.tell_with(request, payload, fd);
        assert_eq!((&front_end.socket).read(&mut [0; 20]).unwrap_or(0), 0, "{request}");
    }
}
