//! The system calls of a sandboxed proposer: each call that can touch other files, processes, keys or the
//! machine is refused, and each number of the kernel's table is decided.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;

use host::store::Scratch;
use libc::*;

use crate::sandbox::{can_be_had, sandboxed, unrestricted};

/// The lists of the command itself.
#[path = "../../src/sandboxed/calls.rs"]
mod calls;

/// Names with numbers.
macro_rules! numbers {
    ($($name:ident)*) => { &[$((stringify!($name), $name)),*] };
}

/// Calls that are refused with all arguments.
const REFUSED: &[(&str, c_long)] = numbers![
    // Mode, owner, times and attributes of files.
    SYS_fchmod SYS_fchmodat SYS_fchown SYS_fchownat SYS_utimensat SYS_setxattr SYS_lsetxattr
    SYS_fsetxattr SYS_removexattr SYS_lremovexattr SYS_fremovexattr
    // Other processes.
    SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_process_madvise SYS_process_mrelease SYS_kcmp
    SYS_pidfd_open SYS_pidfd_getfd SYS_pidfd_send_signal SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo
    SYS_get_robust_list SYS_migrate_pages SYS_move_pages SYS_ioprio_set SYS_ioprio_get SYS_sched_setparam
    SYS_sched_setscheduler SYS_sched_setattr SYS_setns SYS_unshare
    // The user and the rights of the process.
    SYS_setuid SYS_setgid SYS_setreuid SYS_setregid SYS_setresuid SYS_setresgid SYS_setfsuid SYS_setfsgid
    SYS_setgroups SYS_capset
    // The process group, by which the run ends a proposer.
    SYS_setpgid SYS_setsid
    // Memory, messages and keys that are found by a key or a name.
    SYS_shmget SYS_shmat SYS_shmctl SYS_shmdt SYS_semget SYS_semop SYS_semctl SYS_semtimedop SYS_msgget
    SYS_msgsnd SYS_msgrcv SYS_msgctl SYS_mq_open SYS_mq_unlink SYS_mq_timedsend SYS_mq_timedreceive
    SYS_mq_notify SYS_mq_getsetattr SYS_add_key SYS_request_key SYS_keyctl
    // Sockets.
    SYS_socket SYS_bind SYS_listen SYS_connect SYS_accept SYS_accept4
    // Handles, mounts, quotas and what happens to files.
    SYS_name_to_handle_at SYS_open_by_handle_at SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_open_tree
    SYS_move_mount SYS_fsopen SYS_fsconfig SYS_fsmount SYS_fspick SYS_mount_setattr SYS_quotactl
    SYS_quotactl_fd SYS_fanotify_init SYS_fanotify_mark SYS_inotify_init1 SYS_inotify_add_watch
    SYS_inotify_rm_watch SYS_sync SYS_syncfs SYS_acct SYS_swapon SYS_swapoff
    // Interfaces with calls of their own.
    SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_io_setup SYS_io_destroy SYS_io_submit
    SYS_io_cancel SYS_io_getevents SYS_perf_event_open SYS_bpf SYS_userfaultfd SYS_memfd_secret
    SYS_remap_file_pages SYS_lookup_dcookie SYS_nfsservctl
    // The machine.
    SYS_reboot SYS_kexec_load SYS_kexec_file_load SYS_init_module SYS_finit_module SYS_delete_module
    SYS_sethostname SYS_setdomainname SYS_settimeofday SYS_clock_settime SYS_adjtimex SYS_clock_adjtime
    SYS_syslog SYS_vhangup
];

/// Refused calls that aarch64 does not have.
#[cfg(target_arch = "x86_64")]
const EARLIER: &[(&str, c_long)] = numbers![
    SYS_chmod SYS_chown SYS_lchown SYS_utime SYS_utimes SYS_futimesat SYS_inotify_init SYS_uselib SYS_ustat
    SYS_sysfs SYS_modify_ldt SYS__sysctl SYS_iopl SYS_ioperm SYS_getpmsg SYS_putpmsg SYS_afs_syscall
    SYS_tuxcall SYS_security SYS_set_thread_area SYS_get_thread_area SYS_epoll_ctl_old SYS_epoll_wait_old
    SYS_vserver
];
#[cfg(target_arch = "aarch64")]
const EARLIER: &[(&str, c_long)] = &[];

/// Refused calls for which `libc` has no names.
const UNNAMED: &[(&str, c_long)] = &[
    ("cachestat", 451),
    ("fchmodat2", 452),
    ("statmount", 457),
    ("listmount", 458),
    ("lsm_get_self_attr", 459),
    ("lsm_set_self_attr", 460),
    ("lsm_list_modules", 461),
    ("setxattrat", 463),
    ("removexattrat", 466),
    ("open_tree_attr", 467),
    ("file_getattr", 468),
    ("file_setattr", 469),
    ("listns", 470),
    #[cfg(target_arch = "x86_64")]
    ("create_module", 174),
    #[cfg(target_arch = "x86_64")]
    ("get_kernel_syms", 177),
    #[cfg(target_arch = "x86_64")]
    ("query_module", 178),
    #[cfg(target_arch = "x86_64")]
    ("io_pgetevents", 333),
    #[cfg(target_arch = "aarch64")]
    ("io_pgetevents", 292),
];

/// The numbers of the table: the older calls of the architecture, then those that all architectures share.
#[cfg(target_arch = "x86_64")]
const TABLE: [std::ops::Range<c_long>; 2] = [0..335, 424..calls::END as c_long];
#[cfg(target_arch = "aarch64")]
const TABLE: [std::ops::Range<c_long>; 3] = [0..244, 260..295, 424..calls::END as c_long];

fn refused() -> Vec<(&'static str, c_long)> {
    [REFUSED, EARLIER, UNNAMED].concat()
}

/// A new call of the kernel is either in the list of the command or in one of the lists here.
#[test]
fn each_number_of_the_table_is_decided() {
    let allowed = calls::allowed().unwrap();
    let refused: BTreeMap<c_long, &str> =
        refused().into_iter().map(|(name, number)| (number, name)).collect();
    for number in TABLE.into_iter().flatten() {
        let listed = [
            allowed.contains_key(&number),
            refused.contains_key(&number),
            calls::ABSENT.iter().any(|(absent, _)| *absent == number),
        ];
        let lists = listed.iter().filter(|&&listed| listed).count();
        assert_eq!(lists, 1, "call {number} ({:?}) is in {lists} lists", refused.get(&number));
    }
    assert_eq!(refused.len(), REFUSED.len() + EARLIER.len() + UNNAMED.len());
    assert!(calls::filter().unwrap().len() < 4096, "the kernel takes no longer filter");
}

/// A call: what it is, its number and its arguments.
type Call = (String, c_long, Vec<i64>);

/// Makes calls in a sandbox from one small process. The error number of each by its name.
fn errors(calls: &[Call]) -> BTreeMap<String, i32> {
    let own = Scratch::new().unwrap();
    let list: Vec<String> = calls
        .iter()
        .map(|(name, number, arguments)| format!("(\"{name}\", {number}, {arguments:?})"))
        .collect();
    // A call that is not refused fails as well: no descriptor, address or process has the number -1.
    let program = format!(
        "import ctypes\n\
         call = ctypes.CDLL(None, use_errno=True).syscall\n\
         for name, number, arguments in [{}]:\n \
           ctypes.set_errno(0)\n \
           call(*map(ctypes.c_long, [number, *arguments]))\n \
           print(name, ctypes.get_errno())",
        list.join(", ")
    );
    let said = sandboxed(&own.path(""), &[], &format!("exec python3 -c '{program}'"));
    assert!(said.status.success(), "{said:?}");
    let text = String::from_utf8(said.stdout).unwrap();
    let errors: BTreeMap<_, _> = text
        .lines()
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, error)| (name.to_owned(), error.parse().unwrap()))
        .collect();
    assert_eq!(errors.len(), calls.len());
    errors
}

#[test]
fn every_refused_call_is_refused() {
    if !can_be_had() {
        return;
    }
    let calls: Vec<Call> =
        refused().into_iter().map(|(name, number)| (name.to_owned(), number, vec![-1; 6])).collect();
    let others: Vec<_> = errors(&calls).into_iter().filter(|(_, error)| *error != EPERM).collect();
    assert!(others.is_empty(), "{others:?}");
}

#[test]
fn calls_beyond_the_table_do_not_exist() {
    if !can_be_had() {
        return;
    }
    let x32 = |number: c_long| 0x4000_0000 | number;
    // 512 to 547 are calls of the x32 interface.
    let beyond = [calls::END.into(), 512, 520, 547, 1000, x32(SYS_getpid), x32(SYS_openat), x32(SYS_fchmod)];
    let beyond = beyond.map(|number: c_long| (number, ENOSYS));
    let expected: BTreeMap<String, i32> = calls::ABSENT
        .iter()
        .copied()
        .chain(beyond)
        .map(|(number, error)| (number.to_string(), error))
        .collect();
    let calls: Vec<Call> =
        expected.keys().map(|number| (number.clone(), number.parse().unwrap(), vec![-1; 6])).collect();
    assert_eq!(errors(&calls), expected);
}

/// The upper half of an argument of 32 bits, which the kernel ignores.
const UPPER: i64 = 1 << 32;

#[test]
fn arguments_decide_about_some_calls() {
    if !can_be_had() {
        return;
    }
    let parent = i64::from(std::process::id());
    let call = |number: c_long, arguments: &[i64]| {
        (format!("{number} {arguments:?}").replace(' ', "_"), number, arguments.to_vec())
    };
    let [unix, inet, stream, datagram] = [AF_UNIX, AF_INET, SOCK_STREAM, SOCK_DGRAM].map(i64::from);
    let set_flags = 0x4008_6602;
    let refused = [
        call(SYS_prlimit64, &[parent, 0, 0, 0]),
        call(SYS_prlimit64, &[UPPER | parent, 0, 0, 0]),
        call(SYS_prlimit64, &[-1, 0, 0, 0]),
        call(SYS_sched_setaffinity, &[parent, 0, 0]),
        call(SYS_setpriority, &[PRIO_PROCESS.into(), parent, 19]),
        call(SYS_setpriority, &[PRIO_PGRP.into(), 0, 19]),
        call(SYS_setpriority, &[PRIO_USER.into(), 0, 19]),
        call(SYS_setpriority, &[UPPER | i64::from(PRIO_USER), 0, 19]),
        call(SYS_prctl, &[62, 2, parent, 0, 0]),
        call(SYS_socketpair, &[unix, datagram, 0, -1]),
        call(SYS_socketpair, &[unix, datagram | i64::from(SOCK_CLOEXEC), 0, -1]),
        // The kernel makes a pair of datagram sockets of it.
        call(SYS_socketpair, &[unix, SOCK_RAW.into(), 0, -1]),
        call(SYS_socketpair, &[inet, stream, 0, -1]),
        call(SYS_socketpair, &[AF_NETLINK.into(), stream, 0, -1]),
        call(SYS_sendto, &[-1, 0, 0, 0, 1, 2]),
        call(SYS_sendto, &[-1, 0, 0, 0, UPPER, 2]),
        call(SYS_ioctl, &[-1, set_flags, 0]),
        call(SYS_ioctl, &[-1, UPPER | set_flags, 0]),
        call(SYS_ioctl, &[-1, 0x401c_5820, 0]),
        call(SYS_ioctl, &[-1, TIOCSTI as i64, 0]),
        call(SYS_ioctl, &[-1, FIOASYNC as i64, 0]),
        call(SYS_fcntl, &[-1, F_SETOWN.into(), parent]),
        call(SYS_fcntl, &[-1, UPPER | i64::from(F_SETOWN), parent]),
        call(SYS_fcntl, &[-1, 10, 9]),
        call(SYS_fcntl, &[-1, 15, 0]),
        call(SYS_fcntl, &[-1, F_SETLEASE.into(), 0]),
        call(SYS_fcntl, &[-1, F_NOTIFY.into(), 0]),
        call(SYS_fcntl, &[-1, 1036, 0]),
        call(SYS_fcntl, &[-1, 1038, 0]),
    ];
    // Without `CLONE_VM`, a thread cannot be made: the calls fail even if they are not refused.
    let thread = i64::from(CLONE_THREAD);
    let spaces = [
        CLONE_NEWNS,
        CLONE_NEWCGROUP,
        CLONE_NEWUTS,
        CLONE_NEWIPC,
        CLONE_NEWUSER,
        CLONE_NEWPID,
        CLONE_NEWNET,
        CLONE_PARENT,
    ];
    let spaces = spaces.map(|space| call(SYS_clone, &[thread | i64::from(space), 0, 0, 0, 0]));
    let refused: Vec<Call> = refused.into_iter().chain(spaces).collect();
    let others: Vec<_> = errors(&refused).into_iter().filter(|(_, error)| *error != EPERM).collect();
    assert!(others.is_empty(), "{others:?}");
    let allowed = [
        call(SYS_prlimit64, &[0, 0, 0, -1]),
        call(SYS_prlimit64, &[UPPER, 0, 0, -1]),
        call(SYS_sched_setaffinity, &[0, 0, 0]),
        call(SYS_setpriority, &[PRIO_PROCESS.into(), 0, 19]),
        call(SYS_prctl, &[PR_SET_NAME.into(), -1, 0, 0, 0]),
        call(SYS_socketpair, &[unix, stream | i64::from(SOCK_CLOEXEC), 0, -1]),
        call(SYS_socketpair, &[unix, i64::from(SOCK_SEQPACKET | SOCK_NONBLOCK), 0, -1]),
        call(SYS_sendto, &[-1, 0, 0, 0, 0, 0]),
        call(SYS_ioctl, &[-1, TCGETS as i64, 0]),
        call(SYS_fcntl, &[-1, F_GETFD.into(), 0]),
        call(SYS_clone, &[thread, 0, 0, 0, 0]),
    ];
    let others: Vec<_> =
        errors(&allowed).into_iter().filter(|(_, error)| [EPERM, ENOSYS].contains(error)).collect();
    assert!(others.is_empty(), "{others:?}");
}

/// The 32-bit interface has other numbers for the calls: 20 is `getpid` there and `writev` in 64 bits.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_call_of_the_32_bit_interface_ends_the_process() {
    if !can_be_had() {
        return;
    }
    let own = Scratch::new().unwrap();
    // mov eax, 20; int 0x80; ret
    let line = "exec python3 -c 'import ctypes, mmap\n\
        code = mmap.mmap(-1, 4096, prot=7)\n\
        code.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))\n\
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()\n\
        print(\"reached\")'";
    let free = unrestricted(line);
    if free.status.signal() == Some(SIGSEGV) {
        // This kernel has no 32-bit interface, with or without a sandbox.
        filetest::not_run("the kernel has no 32-bit interface");
        return;
    }
    assert!(free.status.success() && free.stdout == b"reached\n", "{free:?}");
    let said = sandboxed(&own.path(""), &[], line);
    assert_eq!((said.status.signal(), said.stdout.as_slice()), (Some(SIGSYS), &b""[..]), "{said:?}");
}
