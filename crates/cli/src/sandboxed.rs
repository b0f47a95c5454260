//! `flashcore sandboxed`: restricts this process, then replaces it by a shell command. `flashcore evolve`
//! starts its proposer through this command when --proposer-sandbox is given. The chapter on proposers in the
//! book says what a proposer in a sandbox may still do.

use crate::Status;
use crate::args::Sandboxed;
use crate::error::CliError;

#[cfg(target_os = "linux")]
pub fn sandboxed(args: &Sandboxed) -> Result<Status, CliError> {
    use std::os::unix::process::CommandExt;
    linux::restrict(args).map_err(CliError::Sandbox)?;
    let error = linux::command(args).exec();
    Err(CliError::Sandbox(format!("sh cannot be started: {error}")))
}

#[cfg(not(target_os = "linux"))]
pub fn sandboxed(_: &Sandboxed) -> Result<Status, CliError> {
    Err(CliError::Sandbox("this system is not Linux, which alone has Landlock and seccomp".to_owned()))
}

#[cfg(target_os = "linux")]
mod linux {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use landlock::{
        ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
        RulesetCreated, RulesetCreatedAttr, RulesetError, Scope, path_beneath_rules,
    };
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

    use crate::args::Sandboxed;

    /// The oldest Landlock interface that the sandbox accepts (Linux 6.2). Earlier ones cannot forbid
    /// truncating a file.
    const LEAST: ABI = ABI::V3;
    /// The newest Landlock interface whose rights are used (Linux 6.12): device control, signals, abstract
    /// sockets.
    const NEWEST: ABI = ABI::V6;

    /// Programs, libraries and the files that they read at start. Paths that a system does not have are left
    /// out.
    const SYSTEM: [&str; 15] = [
        "/usr",
        "/bin",
        "/sbin",
        "/lib",
        "/lib32",
        "/lib64",
        "/nix/store",
        "/etc/alternatives",
        "/etc/ld.so.cache",
        "/etc/ld.so.conf",
        "/etc/ld.so.conf.d",
        "/etc/locale.alias",
        "/etc/localtime",
        "/dev/random",
        "/dev/urandom",
    ];
    /// Device files that hold no data.
    const EMPTY: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/full"];

    /// Environment variables that are passed on if they are set. The last one marks the processes of a
    /// proposer, so that the run can find and end them.
    const KEPT: [&str; 6] = ["PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "FLASHCORE_CONFINED"];

    /// The shell command, with the environment variables that it may see.
    pub fn command(args: &Sandboxed) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(&args.line).env_clear();
        let kept = KEPT.iter().copied().chain(args.env.iter().map(String::as_str));
        command.envs(kept.filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.env("HOME", &args.folder).env("TMPDIR", &args.folder);
        command
    }

    /// Restricts this process and all its children, permanently.
    pub fn restrict(args: &Sandboxed) -> Result<(), String> {
        let filter = without_network()?;
        restrict_files(args)?;
        seccompiler::apply_filter(&filter).map_err(|error| {
            format!("the kernel takes no seccomp filter ({error}); it needs CONFIG_SECCOMP_FILTER")
        })
    }

    fn restrict_files(args: &Sandboxed) -> Result<(), String> {
        let landlock = |error: RulesetError| {
            format!(
                "the kernel offers no Landlock of version 3 or later ({error}); it needs Linux 6.2 with CONFIG_SECURITY_LANDLOCK, \
                     and `landlock` in the list of security modules"
            )
        };
        let rules = (|| {
            Ruleset::default()
                .set_compatibility(CompatLevel::HardRequirement)
                .handle_access(AccessFs::from_all(LEAST))?
                .set_compatibility(CompatLevel::BestEffort)
                .handle_access(AccessFs::from_all(NEWEST))?
                .scope(Scope::from_all(NEWEST))?
                .create()
        })()
        .map_err(landlock)?;
        let reading = AccessFs::from_read(NEWEST);
        let rules = rules.add_rules(path_beneath_rules(SYSTEM, reading)).map_err(landlock)?;
        let rules = rules
            .add_rules(path_beneath_rules(EMPTY, AccessFs::ReadFile | AccessFs::WriteFile))
            .map_err(landlock)?;
        let rules = args.read.iter().try_fold(rules, |rules, path| {
            let allowed = if path.is_dir() { reading } else { AccessFs::ReadFile | AccessFs::Execute };
            allow(rules, path, allowed)
        })?;
        let rules = allow(rules, &args.folder, AccessFs::from_all(NEWEST))?;
        rules.restrict_self().map(|_| ()).map_err(landlock)
    }

    fn allow(
        rules: RulesetCreated,
        path: &PathBuf,
        access: BitFlags<AccessFs>,
    ) -> Result<RulesetCreated, String> {
        let fault =
            |error: &dyn std::fmt::Display| format!("{} cannot be allowed: {error}", Path::display(path));
        let place = PathFd::new(path).map_err(|error| fault(&error))?;
        rules.add_rule(PathBeneath::new(place, access)).map_err(|error| fault(&error))
    }

    /// The seccomp filter that refuses to make sockets, and with them every kind of network. `socketpair`
    /// stays allowed. The filter also refuses io_uring, which can make sockets without the `socket` system
    /// call, and the calls on the kernel's key ring, which holds keys of the user.
    fn without_network() -> Result<BpfProgram, String> {
        /// The x32 interface of x86-64 has the same system calls with this bit set in their numbers.
        const X32: i64 = 0x4000_0000;
        let refused = [
            libc::SYS_socket,
            libc::SYS_io_uring_setup,
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_keyctl,
        ];
        let numbers = refused.into_iter().flat_map(|number| [number, number | X32]);
        let arch = TargetArch::try_from(std::env::consts::ARCH)
            .map_err(|error| format!("no seccomp filter for this processor: {error}"))?;
        let (allowed, denied) = (SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32));
        let filter =
            SeccompFilter::new(numbers.map(|number| (number, vec![])).collect(), allowed, denied, arch);
        filter.and_then(BpfProgram::try_from).map_err(|error| format!("no seccomp filter: {error}"))
    }
}
