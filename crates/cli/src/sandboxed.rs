//! `flashcore sandboxed`: restricts this process, then replaces it by a shell command. `flashcore evolve`
//! starts its proposer through this command when --proposer-sandbox is given. The chapter on proposers in the
//! book says what a proposer in a sandbox may still do.

use crate::Status;
use crate::args::Sandboxed;
use crate::error::CliError;

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod calls;

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn sandboxed(args: &Sandboxed) -> Result<Status, CliError> {
    use std::os::unix::process::CommandExt;
    linux::restrict(args).map_err(CliError::Sandbox)?;
    let error = linux::command(args).exec();
    Err(CliError::Sandbox(format!("sh cannot be started: {error}")))
}

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub fn sandboxed(_: &Sandboxed) -> Result<Status, CliError> {
    Err(CliError::Sandbox("it needs Landlock and seccomp of Linux on x86-64 or aarch64".to_owned()))
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod linux {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use landlock::{
        ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
        RulesetCreated, RulesetCreatedAttr, RulesetError, Scope, path_beneath_rules,
    };

    use super::calls;
    use crate::args::Sandboxed;

    /// The oldest Landlock interface that the sandbox accepts (Linux 6.2). Earlier ones cannot forbid
    /// truncating a file.
    const LEAST: ABI = ABI::V3;
    /// The newest Landlock interface whose rights are used (Linux 6.12): device control, signals, abstract
    /// sockets.
    const NEWEST: ABI = ABI::V6;

    /// Programs, libraries and the files that they read at start. Paths that a system does not have are left
    /// out.
    const SYSTEM: [&str; 16] = [
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
        "/etc/ssl/openssl.cnf",
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
        let filter = calls::filter().map_err(|error| format!("no seccomp filter: {error}"))?;
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
        // Through a device node of its own, root would reach the disk.
        let devices = AccessFs::MakeBlock | AccessFs::MakeChar | AccessFs::IoctlDev;
        let rules = allow(rules, &args.folder, AccessFs::from_all(NEWEST) & !devices)?;
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
}
