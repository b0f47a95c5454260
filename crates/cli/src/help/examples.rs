//! Examples of every command, for its help and its manual page. A test parses each line.

/// The commands without `flashcore`, each with its examples.
const EXAMPLES: &[(&str, &[&str])] = &[
    (
        "",
        &[
            "flashcore check kernel.ptx --launch kernel.toml    # is my kernel right?",
            "flashcore explain kernel.ptx --launch kernel.toml  # why is it slow?",
            "flashcore evolve --device cpu --minutes 2          # search for a faster plan",
        ],
    ),
    (
        "climb",
        &[
            "flashcore climb",
            "flashcore climb --device cpu --out - > report.html",
            "flashcore climb --json > climb.json",
        ],
    ),
    (
        "check",
        &[
            "flashcore check kernel.ptx --launch kernel.toml",
            "flashcore check kernel.cu --launch kernel.toml --sm 90a --keep-ptx kernel.ptx",
            "flashcore check kernel.cu --grid 8 --block 128 --arg x:f32:1024=random --arg out:f32:1024 --arg n:i32=1000",
            "flashcore check kernel.py:softmax --constexpr BLOCK=128 --grid 8 --arg y:f32:8x100 --arg x:f32:8x100=random --arg n:i32=100",
            "flashcore check kernel.cu -I include --suggest > kernel.toml",
            "flashcore check kernel.ptx --launch kernel.toml --require-coverage 100 --json",
            "flashcore check kernel.cu --launch kernel.toml --sarif kernel.sarif --junit kernel.xml",
            "flashcore check kernel.cu --launch kernel.toml --coverage --diagnose --gpu H100",
            "flashcore check kernel.ptx --launch large.toml --budget 30    # CTAs that stand for a large grid",
            "flashcore check - --launch kernel.toml < kernel.ptx",
        ],
    ),
    (
        "explain",
        &[
            "flashcore explain --gpu H200",
            "flashcore explain kernel.ptx --launch kernel.toml --gpu A100 --lines 30",
            "flashcore explain --problem 1,8,512,64,f16,causal --device H200",
        ],
    ),
    (
        "run",
        &[
            "flashcore run --q q.npy --k k.npy --v v.npy --out out.npy --causal",
            "flashcore run --q qkv.safetensors --out out.safetensors --window 127,0",
            "flashcore run --q - --out - < qkv.safetensors > out.safetensors",
        ],
    ),
    (
        "bench",
        &[
            "flashcore bench",
            "flashcore bench --shape 1x12x1024x64 --dtype bf16 --mask causal",
            "flashcore bench --device cuda --suite mission --mode warm --json",
        ],
    ),
    (
        "evolve",
        &[
            "flashcore evolve --device cpu --minutes 2",
            "flashcore evolve --device h200 --problem 4,16,4096,128,bf16,causal --candidates 500",
            "flashcore evolve --resume",
        ],
    ),
    ("report", &["flashcore report", "flashcore report --run 3 --out run3.html"]),
    ("serve", &["flashcore serve", "flashcore serve --ledger other.ledger --port 0"]),
    (
        "topk",
        &[
            "flashcore topk --problem 1,8,512,64,f16 --device h200",
            "flashcore topk --problem 1,8,512,64,f32 --device cpu -k 3 --json",
        ],
    ),
    ("plans", &["flashcore plans list", "flashcore plans check"]),
    ("plans list", &["flashcore plans list", "flashcore plans list --json"]),
    ("plans add", &["flashcore plans add --problem 1,8,512,64,f32 --plan plan.json"]),
    ("plans check", &["flashcore plans check --seconds 5"]),
    ("plans clear", &["flashcore plans clear", "flashcore plans clear --problem 1,8,512,64,f32"]),
    ("forecast", &["flashcore forecast list", "flashcore forecast score"]),
    (
        "forecast add",
        &[
            "flashcore forecast add \"two stages suffice\" --author Ada --device h200 --problem 1,8,512,64,f16 --us 4.2",
        ],
    ),
    ("forecast outcome", &["flashcore forecast outcome 3 --us 4.4 --note \"measured on the H200\""]),
    ("forecast list", &["flashcore forecast list -n 10"]),
    ("forecast score", &["flashcore forecast score", "flashcore forecast score --json"]),
    ("forecast recalibrate", &["flashcore forecast recalibrate --device cpu"]),
    ("ledger", &["flashcore ledger runs", "flashcore ledger check"]),
    (
        "ledger export",
        &[
            "flashcore ledger export facts.jsonl",
            "flashcore ledger export - | grep rejection",
            "flashcore ledger export facts --parquet",
        ],
    ),
    ("ledger check", &["flashcore ledger check", "flashcore ledger check --ledger other.ledger --json"]),
    ("ledger runs", &["flashcore ledger runs"]),
    (
        "accuracy",
        &["flashcore accuracy --keys 8192", "flashcore accuracy --keys 1048576 --out accuracy.html"],
    ),
    ("doctor", &["flashcore doctor", "flashcore doctor --json"]),
    ("emulate", &["flashcore emulate < requests > answers"]),
    ("lab", &["flashcore lab microbench --out machine.json"]),
    ("lab tables", &["flashcore lab tables README.md --check"]),
    (
        "lab selftest",
        &["flashcore lab selftest --quick", "flashcore lab selftest --family wgmma --no-sanitizer"],
    ),
    (
        "lab microbench",
        &[
            "flashcore lab microbench --out machine.json",
            "flashcore lab microbench --emulator --only mma --out emulated.json",
        ],
    ),
    (
        "completions",
        &[
            "flashcore completions bash > ~/.local/share/bash-completion/completions/flashcore",
            "flashcore completions zsh > ~/.zfunc/_flashcore",
            "flashcore completions fish > ~/.config/fish/completions/flashcore.fish",
        ],
    ),
    ("man", &["flashcore man check | man -l -", "flashcore man --out ~/.local/share/man/man1"]),
    ("version", &["flashcore version", "flashcore version --json"]),
];

/// The examples of a command.
pub fn of(command: &str) -> Option<&'static [&'static str]> {
    EXAMPLES.iter().find(|(name, _)| *name == command).map(|(_, lines)| *lines)
}

/// The examples of all commands.
#[cfg(test)]
pub fn all() -> impl Iterator<Item = &'static str> {
    EXAMPLES.iter().flat_map(|(_, lines)| lines.iter().copied())
}
