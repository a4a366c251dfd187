//! A filter (seccomp) that denies a serving daemon the system calls that it never makes, so that
//! code of an attacker in it reaches less of the kernel, starts no program and attaches to no
//! process (`docs/decisions`, number 78).
//!
//! A denied call fails with EPERM. The filter applies to all threads and cannot be removed.

use crate::sys;
use libc::c_long;
use std::io;
use std::mem::offset_of;

/// Denies all threads of this process the calls of `DENIED`, new processes, and sockets of
/// address families without a use.
///
/// # Errors
/// If the kernel has no such filters, or the process may still gain privileges.
pub fn deny_unused() -> io::Result<()> {
    sys::filter_system_calls(&program())
}

/// An instruction: code, jumps if true and false, operand.
type SeccompInstruction = (u32, u8, u8, u32);

fn program() -> Vec<libc::sock_filter> {
    let load = |offset: usize| (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset as u32);
    let first_argument = offset_of!(libc::seccomp_data, args);
    let mut all = vec![load(offset_of!(libc::seccomp_data, arch))];
    all.extend(unless(libc::BPF_JEQ, ARCHITECTURE, DENY));
    all.push(load(offset_of!(libc::seccomp_data, nr)));
    // x32, a further set of numbers, of which the daemon uses none.
    all.extend(when(libc::BPF_JGE, 0x4000_0000, DENY));
    DENIED.iter().for_each(|&number| all.extend(when_called(number, DENY)));
    // The flags of clone3 are in memory. The C library then uses clone.
    all.extend(when_called(libc::SYS_clone3, fail(libc::ENOSYS)));
    // A thread, but no process.
    let is_thread = when(libc::BPF_JSET, libc::CLONE_THREAD as u32, ALLOW);
    all.extend(block(libc::SYS_clone, [load(first_argument)].into_iter().chain(is_thread), DENY));
    let known = FAMILIES.iter().flat_map(|&family| when(libc::BPF_JEQ, family as u32, ALLOW));
    let checks = [load(first_argument)].into_iter().chain(known);
    all.extend(block(libc::SYS_socket, checks, fail(libc::EAFNOSUPPORT)));
    all.push(answer(ALLOW));
    let filter = |(code, jt, jf, k): SeccompInstruction| libc::sock_filter { code: code as u16, jt, jf, k };
    all.into_iter().map(filter).collect()
}

fn answer(value: u32) -> SeccompInstruction {
    (libc::BPF_RET | libc::BPF_K, 0, 0, value)
}

/// Returns `value` if the comparison with the operand is true.
fn when(comparison: u32, operand: u32, value: u32) -> [SeccompInstruction; 2] {
    [(libc::BPF_JMP | comparison | libc::BPF_K, 0, 1, operand), answer(value)]
}

/// Returns `value` if the comparison with the operand is false.
fn unless(comparison: u32, operand: u32, value: u32) -> [SeccompInstruction; 2] {
    [(libc::BPF_JMP | comparison | libc::BPF_K, 1, 0, operand), answer(value)]
}

fn when_called(number: c_long, value: u32) -> [SeccompInstruction; 2] {
    when(libc::BPF_JEQ, number as u32, value)
}

/// Makes these checks of a call, and returns `value` if none of them returns.
fn block(
    number: c_long,
    checks: impl Iterator<Item = SeccompInstruction>,
    value: u32,
) -> impl Iterator<Item = SeccompInstruction> {
    let checks: Vec<_> = checks.chain([answer(value)]).collect();
    // At most a few families, so the jump is short.
    let others = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, checks.len() as u8, number as u32);
    [others].into_iter().chain(checks)
}

const fn fail(errno: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | errno as u32
}

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const DENY: u32 = fail(libc::EPERM);

/// `AUDIT_ARCH_X86_64` and its like in `linux/audit.h`.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;
#[cfg(target_arch = "riscv64")]
const ARCHITECTURE: u32 = 0xc000_00f3;

/// Address families of sockets. The C library looks up names and interfaces with AF_NETLINK.
const FAMILIES: [i32; 5] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_PACKET, libc::AF_NETLINK];

/// Calls that the daemon never makes once it serves.
const DENIED: &[c_long] = &[
    // Programs and other processes.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
    // Users.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    // Namespaces and mounts.
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    // Files by handle, and special files.
    libc::SYS_open_by_handle_at,
    libc::SYS_mknodat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mknod,
    libc::SYS_fanotify_init,
    libc::SYS_quotactl,
    libc::SYS_acct,
    // The kernel.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_personality,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_vhangup,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
    // Clock and host name.
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
];
