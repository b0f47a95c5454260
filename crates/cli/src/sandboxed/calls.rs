//! The system calls of a proposer in a sandbox, as a seccomp filter.
//!
//! Landlock decides which files can be opened, made, renamed, deleted and executed. It does not cover the
//! other calls that take a path, a process or a key: a change of mode, owner, times or attributes, a limit or
//! a priority of another process, shared memory. The filter decides about these.
//!
//! The filter lists the calls that are allowed. A list of refused calls would be incomplete with each new
//! version of Linux. All other calls fail with EPERM, but for those of [`ABSENT`] and those from [`END`] on.
//!
//! A file descriptor gives no more rights than its path: a file that may be read must not change its mode
//! through `fchmod`, so the calls on descriptors are refused, too. The filter cannot see which file a
//! descriptor or a path names. The refusal therefore includes the proposer's own files.

use std::collections::BTreeMap;

use libc::*;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};

/// Calls on open files, memory, time and waiting. Their arguments are the caller's descriptors and addresses.
const OWN: &[c_long] = &[
    SYS_brk,
    SYS_clock_getres,
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_close,
    SYS_close_range,
    SYS_copy_file_range,
    SYS_dup,
    SYS_dup3,
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_eventfd2,
    SYS_fadvise64,
    SYS_fallocate,
    SYS_fdatasync,
    SYS_fgetxattr,
    SYS_flistxattr,
    SYS_flock,
    SYS_fstat,
    SYS_fstatfs,
    SYS_fsync,
    SYS_ftruncate,
    SYS_futex,
    SYS_futex_waitv,
    SYS_get_mempolicy,
    SYS_getcpu,
    SYS_getdents64,
    SYS_getitimer,
    SYS_getrandom,
    SYS_gettimeofday,
    SYS_lseek,
    SYS_madvise,
    SYS_mbind,
    SYS_membarrier,
    SYS_memfd_create,
    SYS_mincore,
    SYS_mlock,
    SYS_mlock2,
    SYS_mlockall,
    SYS_mmap,
    SYS_mprotect,
    SYS_mremap,
    SYS_mseal,
    SYS_msync,
    SYS_munlock,
    SYS_munlockall,
    SYS_munmap,
    SYS_nanosleep,
    SYS_pipe2,
    SYS_pkey_alloc,
    SYS_pkey_free,
    SYS_pkey_mprotect,
    SYS_ppoll,
    SYS_pread64,
    SYS_preadv,
    SYS_preadv2,
    SYS_pselect6,
    SYS_pwrite64,
    SYS_pwritev,
    SYS_pwritev2,
    SYS_read,
    SYS_readahead,
    SYS_readv,
    SYS_restart_syscall,
    SYS_sendfile,
    SYS_set_mempolicy,
    SYS_set_mempolicy_home_node,
    SYS_setitimer,
    SYS_signalfd4,
    SYS_splice,
    SYS_sync_file_range,
    SYS_tee,
    SYS_timer_create,
    SYS_timer_delete,
    SYS_timer_getoverrun,
    SYS_timer_gettime,
    SYS_timer_settime,
    SYS_timerfd_create,
    SYS_timerfd_gettime,
    SYS_timerfd_settime,
    SYS_vmsplice,
    SYS_write,
    SYS_writev,
    MAP_SHADOW_STACK,
    FUTEX_WAKE_2,
    FUTEX_WAIT_2,
    FUTEX_REQUEUE_2,
];

// Calls for which `libc` has no name yet.
const MAP_SHADOW_STACK: c_long = 453;
const FUTEX_WAKE_2: c_long = 454;
const FUTEX_WAIT_2: c_long = 455;
const FUTEX_REQUEUE_2: c_long = 456;
const GETXATTRAT: c_long = 464;
const LISTXATTRAT: c_long = 465;

/// Calls with a path. Landlock refuses each one that opens, makes, moves, deletes or shortens a file outside
/// the allowed folders. The others read the name, size and times of a file, or change the working directory.
const PATHS: &[c_long] = &[
    SYS_chdir,
    SYS_execve,
    SYS_execveat,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_fchdir,
    SYS_getcwd,
    SYS_linkat,
    SYS_mkdirat,
    SYS_mknodat,
    SYS_newfstatat,
    SYS_openat,
    SYS_openat2,
    SYS_readlinkat,
    SYS_renameat,
    SYS_renameat2,
    SYS_statfs,
    SYS_statx,
    SYS_symlinkat,
    SYS_truncate,
    SYS_umask,
    SYS_unlinkat,
];

/// Calls on processes. Landlock refuses signals to processes outside the sandbox from Linux 6.12 on. The
/// kernel lets the waits take the caller's own children alone. The calls that take another process and are
/// named `get` read a number: its group, session, priority, policy or CPUs. `setsid` and `setpgid` are
/// missing, because the run ends a proposer by its process group.
const PROCESSES: &[c_long] = &[
    SYS_capget,
    SYS_exit,
    SYS_exit_group,
    SYS_getegid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getgroups,
    SYS_getpgid,
    SYS_getpid,
    SYS_getppid,
    SYS_getpriority,
    SYS_getresgid,
    SYS_getresuid,
    SYS_getrusage,
    SYS_getsid,
    SYS_gettid,
    SYS_getuid,
    SYS_kill,
    SYS_personality,
    SYS_rseq,
    SYS_rt_sigaction,
    SYS_rt_sigpending,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_rt_sigsuspend,
    SYS_rt_sigtimedwait,
    SYS_sched_get_priority_max,
    SYS_sched_get_priority_min,
    SYS_sched_getaffinity,
    SYS_sched_getattr,
    SYS_sched_getparam,
    SYS_sched_getscheduler,
    SYS_sched_rr_get_interval,
    SYS_sched_yield,
    SYS_set_robust_list,
    SYS_set_tid_address,
    SYS_sigaltstack,
    SYS_sysinfo,
    SYS_tgkill,
    SYS_times,
    SYS_tkill,
    SYS_uname,
    SYS_wait4,
    SYS_waitid,
];

/// Calls on the two ends of a `socketpair`, and calls that restrict the caller further.
const SOCKETS_AND_SANDBOXES: &[c_long] = &[
    SYS_getpeername,
    SYS_getsockname,
    SYS_getsockopt,
    SYS_landlock_add_rule,
    SYS_landlock_create_ruleset,
    SYS_landlock_restrict_self,
    SYS_recvfrom,
    SYS_recvmmsg,
    SYS_recvmsg,
    SYS_seccomp,
    SYS_sendmmsg,
    SYS_sendmsg,
    SYS_setsockopt,
    SYS_shutdown,
];

/// Earlier forms of the calls above, which aarch64 does not have.
#[cfg(target_arch = "x86_64")]
const EARLIER: &[c_long] = &[
    SYS_access,
    SYS_alarm,
    SYS_arch_prctl,
    SYS_creat,
    SYS_dup2,
    SYS_epoll_create,
    SYS_epoll_wait,
    SYS_eventfd,
    SYS_fork,
    SYS_getdents,
    SYS_getpgrp,
    SYS_getrlimit,
    SYS_link,
    SYS_lstat,
    SYS_mkdir,
    SYS_mknod,
    SYS_open,
    SYS_pause,
    SYS_pipe,
    SYS_poll,
    SYS_readlink,
    SYS_rename,
    SYS_rmdir,
    SYS_select,
    SYS_setrlimit,
    SYS_signalfd,
    SYS_stat,
    SYS_symlink,
    SYS_time,
    SYS_unlink,
    SYS_vfork,
];
/// `getrlimit` and `setrlimit`, for which `libc` has no names.
#[cfg(target_arch = "aarch64")]
const EARLIER: &[c_long] = &[163, 164];

/// Calls that fail with another error than EPERM, because programs then do without: the C library starts
/// threads with `clone` in place of `clone3`, whose flags are in memory that a filter cannot read. `ls -l`
/// and `cp` see a file without attributes. Attributes are data, which Landlock does not guard when a path
/// names the file.
pub const ABSENT: &[(c_long, c_int)] = &[
    (SYS_clone3, ENOSYS),
    (SYS_getxattr, EOPNOTSUPP),
    (SYS_lgetxattr, EOPNOTSUPP),
    (SYS_listxattr, EOPNOTSUPP),
    (SYS_llistxattr, EOPNOTSUPP),
    (GETXATTRAT, EOPNOTSUPP),
    (LISTXATTRAT, EOPNOTSUPP),
];

/// The number after the last call that was considered here (`listns` of Linux 6.19). This and all higher
/// numbers, among them those of the x32 interface, fail with ENOSYS, as on a kernel without them.
pub const END: u32 = 471;

/// Commands of `fcntl` that change the caller's descriptor, or a file that the caller opened for writing.
/// `F_SETOWN` would send signals to another process, and `F_SETLEASE` would delay it.
const FCNTL: &[c_int] = &[
    F_DUPFD,
    F_DUPFD_CLOEXEC,
    F_DUPFD_QUERY,
    F_GETFD,
    F_SETFD,
    F_GETFL,
    F_SETFL,
    F_GETLK,
    F_SETLK,
    F_SETLKW,
    F_OFD_GETLK,
    F_OFD_SETLK,
    F_OFD_SETLKW,
    F_GETOWN,
    F_GETPIPE_SZ,
    F_SETPIPE_SZ,
    F_GET_SEALS,
    F_ADD_SEALS,
];
const F_DUPFD_QUERY: c_int = 1027;

/// Requests of `ioctl` that concern the descriptor alone. Others change attributes of a file that is open for
/// reading, type into a terminal, or control a device.
const IOCTL: &[Ioctl] = &[FIOCLEX, FIONCLEX, FIONBIO, FIONREAD, TCGETS, TCGETS2, TIOCGWINSZ, TIOCGPGRP];

/// Flags of `clone` that make a namespace, in which the caller has all capabilities, or a sibling of the
/// caller, which would be a child of the run.
const NO_CLONE: c_int = CLONE_NEWNS
    | CLONE_NEWCGROUP
    | CLONE_NEWUTS
    | CLONE_NEWIPC
    | CLONE_NEWUSER
    | CLONE_NEWPID
    | CLONE_NEWNET
    | CLONE_PARENT;

/// The one option of `prctl` that takes another process.
const PR_SCHED_CORE: u64 = 62;

/// The allowed calls. A call with rules is allowed if one of the rules fits its arguments.
///
/// # Errors
/// Never: the numbers of the arguments are valid.
pub fn allowed() -> Result<BTreeMap<c_long, Vec<SeccompRule>>, BackendError> {
    let lists = [OWN, PATHS, PROCESSES, SOCKETS_AND_SANDBOXES, EARLIER];
    let mut calls: BTreeMap<_, _> = lists.concat().into_iter().map(|number| (number, Vec::new())).collect();
    let equal = |argument, value| condition(argument, SeccompCmpOp::Eq, value);
    let each = |argument, values: Vec<u64>| -> Result<Vec<SeccompRule>, BackendError> {
        values.into_iter().map(|value| SeccompRule::new(vec![equal(argument, value)?])).collect()
    };
    let all = |conditions| Ok::<_, BackendError>(vec![SeccompRule::new(conditions)?]);
    calls.insert(SYS_fcntl, each(1, FCNTL.iter().map(|&command| command as u64).collect())?);
    // The C libraries disagree about the type of a request.
    calls.insert(SYS_ioctl, each(1, IOCTL.iter().map(|&request| request as _).collect())?);
    calls.insert(SYS_clone, all(vec![condition(0, SeccompCmpOp::MaskedEq(NO_CLONE as u32 as u64), 0)?])?);
    calls.insert(SYS_prctl, all(vec![condition(0, SeccompCmpOp::Ne, PR_SCHED_CORE)?])?);
    // The process 0 is the caller. `PRIO_USER` with 0 would be all processes of the user.
    calls.insert(SYS_setpriority, all(vec![equal(0, PRIO_PROCESS as u64)?, equal(1, 0)?])?);
    calls.insert(SYS_prlimit64, each(0, vec![0])?);
    calls.insert(SYS_sched_setaffinity, each(0, vec![0])?);
    // Connected sockets alone: a pair of datagram sockets can still send to every Unix socket of the machine.
    let pair = |kind: c_int| -> Result<SeccompRule, BackendError> {
        let kind = condition(1, SeccompCmpOp::MaskedEq(SOCKET_KIND), kind as u64)?;
        SeccompRule::new(vec![equal(0, AF_UNIX as u64)?, kind])
    };
    calls.insert(SYS_socketpair, vec![pair(SOCK_STREAM)?, pair(SOCK_SEQPACKET)?]);
    // Without an address.
    let nowhere = SeccompCondition::new(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    calls.insert(SYS_sendto, all(vec![nowhere])?);
    Ok(calls)
}

/// The bits of a socket's type that are no flags.
const SOCKET_KIND: u64 = 0xf;

/// A condition on an argument of 32 bits. The kernel ignores the upper half of such an argument.
fn condition(argument: u8, compared: SeccompCmpOp, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compared, value & u64::from(u32::MAX))
}

/// The filter. A call by the interface of another architecture, such as 32-bit x86, ends the process.
///
/// # Errors
/// When there is no filter for this processor.
pub fn filter() -> Result<BpfProgram, BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let refused = SeccompAction::Errno(EPERM as u32);
    let filter = SeccompFilter::new(allowed()?, refused, SeccompAction::Allow, arch)?;
    let mut program = absent();
    program.extend(BpfProgram::try_from(filter)?);
    Ok(program)
}

/// The beginning of the filter: calls with other errors than EPERM. `SeccompFilter` has one error for all.
fn absent() -> BpfProgram {
    let step = |code: u32, jt, jf, k| sock_filter { code: code as u16, jt, jf, k };
    let answer = |error: c_int| step(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | error as u32);
    // The number of the call is the first word of the data that the filter examines.
    let number = step(BPF_LD | BPF_W | BPF_ABS, 0, 0, 0);
    let mut program = vec![number, step(BPF_JMP | BPF_JGE | BPF_K, 0, 1, END), answer(ENOSYS)];
    for &(number, error) in ABSENT {
        program.extend([step(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, number as u32), answer(error)]);
    }
    program
}
