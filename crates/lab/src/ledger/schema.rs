//! The ledger's tables, and how an older ledger becomes one of this version.
//!
//! A ledger is one SQLite file (`PRAGMA application_id` = [`APPLICATION_ID`], `PRAGMA user_version` = [`VERSION`]) with its write-ahead
//! log beside it. It has two kinds of tables.
//!
//! **Facts**, each row written once: triggers refuse every UPDATE and DELETE.
//!
//! | table | a row is |
//! |---|---|
//! | `problem` | a shape that something was tried on; `shape` is its JSON |
//! | `device` | a device by its name |
//! | `subject` | a plan or a kernel as JSON, kept once however many candidates it is |
//! | `run`, `run_event` | a search with its configuration and environment; its resumptions and ends |
//! | `candidate`, `parent` | a subject in a run: its arm, its operator, what changed against its first parent; its parents in order |
//! | `outcome` | a task's answer: at most one per (candidate, stage, problem); the rows below that came with it name it |
//! | `screening` | hashes of PTX and SASS, resources, the niche, findings |
//! | `proof` | a verdict of the gate |
//! | `measurement` | times of a candidate, every sample (`samples`: f64, little-endian, µs a call); of a race also its end |
//! | `rejection` | why a candidate went no further |
//! | `forecast`, `forecast_outcome` | what someone expected; how an idea came out |
//! | `recalibration` | a map of an author's forecasts, and whether it held on what it had not seen |
//! | `decision` | what was decided, and the figures behind it |
//! | `spending` | device time that belongs to no task |
//!
//! **Summaries**, kept by triggers in the same transaction as the fact they follow from, so that every page and query is quick on a
//! ledger of a million candidates: `standing` (one row a candidate: how far it came, its rank and best-founded time), `tally` (counts per
//! run, problem and arm), `passage` (answers counted, by arm and stage), `operator_tally` (what operators earned; of the baseline's and the
//! control's none), `death` (rejections counted, and the latest of each reason), `cost` (seconds counted), `progress` (the candidates that
//! were the best so far: a curve's corners), `niche` (elites; neither of candidates that are out), `pair` (forecast against what was measured
//! after it). They hold nothing that the facts do not say; `flashcore ledger check` counts after. The view `race` is what races say of times: the incumbent's over the ratio.
//!
//! Times of writing (`at`) are milliseconds since 1970, UTC. Words are those of the records in `facts.rs`.

use rusqlite::Connection;

/// "FCLG": what `file` and other programs can tell a ledger by.
pub const APPLICATION_ID: i64 = 0x4643_4c47;

/// Version of the schema below.
pub const VERSION: i64 = MIGRATIONS.len() as i64;

/// From each version to the next; the first makes a ledger of an empty file. Those that were released are never edited.
const MIGRATIONS: [&str; 5] = [FIRST, RACES, RANKS, ARMS, FALLEN];

/// Tables whose rows are never changed, in an order in which references come after what they name.
pub const FACTS: [&str; 17] = [
    "problem",
    "device",
    "subject",
    "run",
    "run_event",
    "candidate",
    "parent",
    "outcome",
    "screening",
    "forecast",
    "forecast_outcome",
    "proof",
    "measurement",
    "rejection",
    "decision",
    "spending",
    "recalibration",
];

/// Columns that hold JSON: an export writes the value, not the text.
pub const JSON: [&str; 10] = [
    "shape",
    "body",
    "config",
    "environment",
    "changes",
    "findings",
    "reasons",
    "hazards",
    "why",
    "held_out",
];

const FIRST: &str = "
CREATE TABLE problem (id INTEGER PRIMARY KEY, shape TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE device (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE subject (
  id INTEGER PRIMARY KEY,
  hash TEXT NOT NULL,
  body TEXT NOT NULL
) STRICT;
CREATE INDEX subject_by_hash ON subject (hash);

CREATE TABLE run (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  device INTEGER NOT NULL REFERENCES device,
  config TEXT NOT NULL,
  environment TEXT NOT NULL,
  price_per_hour REAL
) STRICT;
CREATE TABLE run_event (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  run INTEGER NOT NULL REFERENCES run,
  event TEXT NOT NULL CHECK (event IN ('resumed', 'stopped', 'finished'))
) STRICT;
CREATE INDEX run_event_by_run ON run_event (run, id);

CREATE TABLE candidate (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  run INTEGER NOT NULL REFERENCES run,
  problem INTEGER NOT NULL REFERENCES problem,
  subject INTEGER NOT NULL REFERENCES subject,
  arm TEXT NOT NULL CHECK (arm IN ('baseline', 'evolution', 'random', 'control')),
  operator TEXT NOT NULL,
  changes TEXT NOT NULL
) STRICT;
CREATE INDEX candidate_by_run ON candidate (run, id);
CREATE INDEX candidate_by_subject ON candidate (subject);
CREATE TABLE parent (
  candidate INTEGER NOT NULL REFERENCES candidate,
  position INTEGER NOT NULL,
  parent INTEGER NOT NULL REFERENCES candidate,
  PRIMARY KEY (candidate, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX parent_by_parent ON parent (parent);

CREATE TABLE outcome (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  run INTEGER NOT NULL REFERENCES run,
  candidate INTEGER NOT NULL REFERENCES candidate,
  stage TEXT NOT NULL CHECK (stage IN ('propose', 'screen', 'prove', 'microbench', 'race', 'held_out')),
  problem INTEGER NOT NULL REFERENCES problem,
  seconds REAL NOT NULL,
  device_seconds REAL NOT NULL,
  finding TEXT NOT NULL CHECK (finding IN ('screened', 'judged', 'timed', 'rejected')),
  UNIQUE (candidate, stage, problem)
) STRICT;
CREATE INDEX outcome_by_run ON outcome (run, id);
CREATE TABLE screening (
  id INTEGER PRIMARY KEY,
  outcome INTEGER REFERENCES outcome,
  candidate INTEGER NOT NULL REFERENCES candidate,
  ptx_hash TEXT NOT NULL,
  sass_hash TEXT,
  registers INTEGER,
  spill_bytes INTEGER,
  shared_bytes INTEGER,
  bound TEXT,
  tile TEXT,
  findings TEXT NOT NULL
) STRICT;
CREATE INDEX screening_by_candidate ON screening (candidate);
CREATE INDEX screening_by_ptx ON screening (ptx_hash);
CREATE INDEX screening_by_sass ON screening (sass_hash) WHERE sass_hash IS NOT NULL;
CREATE TABLE forecast (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  outcome INTEGER REFERENCES outcome,
  candidate INTEGER REFERENCES candidate,
  hypothesis TEXT NOT NULL,
  author TEXT NOT NULL,
  device INTEGER NOT NULL REFERENCES device,
  problem INTEGER REFERENCES problem,
  low_us REAL NOT NULL,
  us REAL NOT NULL,
  high_us REAL NOT NULL
) STRICT;
CREATE INDEX forecast_by_candidate ON forecast (candidate) WHERE candidate IS NOT NULL;
CREATE INDEX forecast_by_hand ON forecast (id) WHERE outcome IS NULL;
CREATE INDEX forecast_of_ideas ON forecast (author, id) WHERE candidate IS NULL;
CREATE TABLE forecast_outcome (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  forecast INTEGER NOT NULL UNIQUE REFERENCES forecast,
  us REAL NOT NULL,
  note TEXT NOT NULL
) STRICT;
CREATE TABLE proof (
  id INTEGER PRIMARY KEY,
  outcome INTEGER REFERENCES outcome,
  candidate INTEGER NOT NULL REFERENCES candidate,
  judge TEXT NOT NULL CHECK (judge IN ('emulator', 'device')),
  verdict TEXT NOT NULL CHECK (verdict IN ('proven', 'incomplete', 'refuted')),
  reasons TEXT NOT NULL,
  hazards TEXT NOT NULL,
  error_rel REAL,
  seconds REAL NOT NULL
) STRICT;
CREATE INDEX proof_by_candidate ON proof (candidate);
CREATE TABLE measurement (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  outcome INTEGER REFERENCES outcome,
  candidate INTEGER NOT NULL REFERENCES candidate,
  trial TEXT NOT NULL CHECK (trial IN ('microbench', 'race', 'held_out')),
  kind TEXT NOT NULL CHECK (kind IN ('measured', 'predicted')),
  problem INTEGER NOT NULL REFERENCES problem,
  samples BLOB NOT NULL,
  us REAL NOT NULL,
  low_us REAL NOT NULL,
  high_us REAL NOT NULL,
  incumbent INTEGER REFERENCES candidate,
  ratio REAL,
  ratio_low REAL,
  ratio_high REAL,
  noise REAL,
  verdict TEXT CHECK (verdict IN ('FASTER', 'SLOWER', 'UNDECIDED'))
) STRICT;
CREATE INDEX measurement_by_candidate ON measurement (candidate);
CREATE INDEX measurement_of_wins ON measurement (id) WHERE verdict = 'FASTER';
CREATE TABLE rejection (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  outcome INTEGER REFERENCES outcome,
  candidate INTEGER NOT NULL REFERENCES candidate,
  stage TEXT NOT NULL CHECK (stage IN ('propose', 'screen', 'prove', 'microbench', 'race', 'held_out')),
  reason TEXT NOT NULL,
  detail TEXT NOT NULL
) STRICT;
CREATE INDEX rejection_by_candidate ON rejection (candidate);
CREATE TABLE decision (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  run INTEGER NOT NULL REFERENCES run,
  what TEXT NOT NULL,
  candidate INTEGER REFERENCES candidate,
  why TEXT NOT NULL
) STRICT;
CREATE INDEX decision_by_run ON decision (run, id);
CREATE TABLE spending (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  run INTEGER NOT NULL REFERENCES run,
  what TEXT NOT NULL,
  device_seconds REAL NOT NULL
) STRICT;
CREATE TABLE recalibration (
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  author TEXT NOT NULL,
  device INTEGER NOT NULL REFERENCES device,
  slope REAL NOT NULL,
  intercept REAL NOT NULL,
  low REAL NOT NULL,
  high REAL NOT NULL,
  calibrated_on INTEGER NOT NULL,
  held_out TEXT NOT NULL,
  adopted INTEGER NOT NULL CHECK (adopted IN (0, 1))
) STRICT;
CREATE INDEX recalibration_by_author ON recalibration (device, author, id);

CREATE TABLE standing (
  candidate INTEGER PRIMARY KEY,
  run INTEGER NOT NULL,
  problem INTEGER NOT NULL,
  device INTEGER NOT NULL,
  subject INTEGER NOT NULL,
  arm TEXT NOT NULL,
  operator TEXT NOT NULL,
  stage TEXT,
  bound TEXT,
  tile TEXT,
  proven INTEGER NOT NULL DEFAULT 0,
  predicted_us REAL,
  trial TEXT,
  kind TEXT,
  us REAL,
  low_us REAL,
  high_us REAL,
  rejected TEXT,
  promoted INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX standing_by_time ON standing (problem, device, kind, us) WHERE us IS NOT NULL;
CREATE INDEX standing_of_run ON standing (run, problem, us) WHERE us IS NOT NULL;
CREATE TABLE tally (
  run INTEGER NOT NULL,
  problem INTEGER NOT NULL,
  arm TEXT NOT NULL,
  candidates INTEGER NOT NULL DEFAULT 0,
  screened INTEGER NOT NULL DEFAULT 0,
  proven INTEGER NOT NULL DEFAULT 0,
  timed INTEGER NOT NULL DEFAULT 0,
  raced INTEGER NOT NULL DEFAULT 0,
  rejected INTEGER NOT NULL DEFAULT 0,
  promoted INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (run, problem, arm)
) STRICT, WITHOUT ROWID;
CREATE TABLE operator_tally (
  run INTEGER NOT NULL,
  operator TEXT NOT NULL,
  candidates INTEGER NOT NULL DEFAULT 0,
  timed INTEGER NOT NULL DEFAULT 0,
  faster INTEGER NOT NULL DEFAULT 0,
  promoted INTEGER NOT NULL DEFAULT 0,
  rejected INTEGER NOT NULL DEFAULT 0,
  gain REAL NOT NULL DEFAULT 1.0,
  PRIMARY KEY (run, operator)
) STRICT, WITHOUT ROWID;
CREATE TABLE death (
  run INTEGER NOT NULL,
  arm TEXT NOT NULL,
  stage TEXT NOT NULL,
  reason TEXT NOT NULL,
  candidates INTEGER NOT NULL,
  PRIMARY KEY (run, arm, stage, reason)
) STRICT, WITHOUT ROWID;
CREATE TABLE cost (
  run INTEGER NOT NULL,
  what TEXT NOT NULL,
  tasks INTEGER NOT NULL,
  seconds REAL NOT NULL,
  device_seconds REAL NOT NULL,
  PRIMARY KEY (run, what)
) STRICT, WITHOUT ROWID;
CREATE TABLE progress (
  run INTEGER NOT NULL,
  problem INTEGER NOT NULL,
  trial TEXT NOT NULL,
  arm TEXT NOT NULL,
  timed INTEGER NOT NULL,
  candidates INTEGER NOT NULL,
  at INTEGER NOT NULL,
  candidate INTEGER NOT NULL,
  us REAL NOT NULL,
  low_us REAL NOT NULL,
  high_us REAL NOT NULL,
  PRIMARY KEY (run, problem, trial, arm, timed)
) STRICT, WITHOUT ROWID;
CREATE TABLE niche (
  run INTEGER NOT NULL,
  problem INTEGER NOT NULL,
  bound TEXT NOT NULL,
  tile TEXT NOT NULL,
  timed INTEGER NOT NULL,
  candidate INTEGER NOT NULL,
  us REAL NOT NULL,
  PRIMARY KEY (run, problem, bound, tile)
) STRICT, WITHOUT ROWID;
CREATE TABLE pair (
  author TEXT NOT NULL,
  device INTEGER NOT NULL,
  forecast INTEGER NOT NULL,
  run INTEGER,
  candidate INTEGER,
  trial TEXT NOT NULL,
  low_us REAL NOT NULL,
  us REAL NOT NULL,
  high_us REAL NOT NULL,
  measured_us REAL NOT NULL,
  PRIMARY KEY (author, device, forecast)
) STRICT, WITHOUT ROWID;
CREATE INDEX pair_of_run ON pair (run, author, forecast);

CREATE TRIGGER candidate_counts AFTER INSERT ON candidate BEGIN
  INSERT INTO standing (candidate, run, problem, device, subject, arm, operator)
    VALUES (new.id, new.run, new.problem, (SELECT device FROM run WHERE id = new.run), new.subject, new.arm, new.operator);
  INSERT INTO tally (run, problem, arm, candidates) VALUES (new.run, new.problem, new.arm, 1)
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
  INSERT INTO operator_tally (run, operator, candidates) VALUES (new.run, new.operator, 1)
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
END;
CREATE TRIGGER outcome_counts AFTER INSERT ON outcome BEGIN
  UPDATE standing SET stage = new.stage WHERE candidate = new.candidate;
  INSERT INTO cost VALUES (new.run, new.stage, 1, new.seconds, new.device_seconds)
    ON CONFLICT DO UPDATE SET
      tasks = tasks + 1, seconds = seconds + new.seconds, device_seconds = device_seconds + new.device_seconds;
END;
CREATE TRIGGER spending_counts AFTER INSERT ON spending BEGIN
  INSERT INTO cost VALUES (new.run, new.what, 1, new.device_seconds, new.device_seconds)
    ON CONFLICT DO UPDATE SET
      tasks = tasks + 1, seconds = seconds + new.device_seconds, device_seconds = device_seconds + new.device_seconds;
END;
CREATE TRIGGER screening_counts AFTER INSERT ON screening BEGIN
  UPDATE standing SET bound = new.bound, tile = new.tile WHERE candidate = new.candidate;
  UPDATE tally SET screened = screened + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
END;
CREATE TRIGGER forecast_counts AFTER INSERT ON forecast WHEN new.candidate IS NOT NULL AND new.author = 'model' BEGIN
  UPDATE standing SET predicted_us = new.us WHERE candidate = new.candidate;
END;
CREATE TRIGGER forecast_outcome_counts AFTER INSERT ON forecast_outcome BEGIN
  INSERT INTO pair SELECT author, device, id, NULL, NULL, 'idea', low_us, us, high_us, new.us FROM forecast WHERE id = new.forecast
    ON CONFLICT DO NOTHING;
END;
CREATE TRIGGER proof_counts AFTER INSERT ON proof
WHEN new.verdict = 'proven' AND (SELECT proven FROM standing WHERE candidate = new.candidate) = 0 BEGIN
  UPDATE standing SET proven = 1 WHERE candidate = new.candidate;
  UPDATE tally SET proven = proven + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
END;
CREATE TRIGGER measurement_counts AFTER INSERT ON measurement WHEN new.trial <> 'held_out' BEGIN
  UPDATE tally SET
    timed = timed + (SELECT us IS NULL FROM standing WHERE candidate = new.candidate),
    raced = raced + (new.trial = 'race')
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET
    timed = timed + (SELECT us IS NULL FROM standing WHERE candidate = new.candidate),
    faster = faster + (new.verdict IS 'FASTER'),
    gain = gain * iif(new.trial = 'race', 1.0, max(1.0, coalesce((SELECT p.us / new.us FROM progress p, standing s WHERE s.candidate = new.candidate
        AND (p.run, p.problem, p.trial, p.arm) = (s.run, s.problem, new.trial, s.arm) ORDER BY p.timed DESC LIMIT 1), 1.0)))
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate);
  INSERT INTO progress
    SELECT s.run, s.problem, new.trial, s.arm, iif(new.trial = 'race', t.raced, t.timed), t.candidates, new.at, new.candidate, new.us, new.low_us,
        new.high_us
      FROM standing s JOIN tally t ON (t.run, t.problem, t.arm) = (s.run, s.problem, s.arm)
      WHERE s.candidate = new.candidate AND new.us < coalesce((SELECT p.us FROM progress p
        WHERE (p.run, p.problem, p.trial, p.arm) = (s.run, s.problem, new.trial, s.arm) ORDER BY p.timed DESC LIMIT 1), 9e999)
    ON CONFLICT DO UPDATE SET
      candidate = excluded.candidate, at = excluded.at, us = excluded.us, low_us = excluded.low_us, high_us = excluded.high_us;
  INSERT INTO niche
    SELECT run, problem, bound, tile, 1, candidate, new.us FROM standing
      WHERE candidate = new.candidate AND arm IN ('baseline', 'evolution') AND bound IS NOT NULL AND tile IS NOT NULL
    ON CONFLICT DO UPDATE SET
      timed = timed + 1, candidate = iif(new.us < us, new.candidate, candidate), us = min(us, new.us);
  INSERT INTO pair
    SELECT author, device, id, (SELECT run FROM candidate WHERE id = new.candidate), new.candidate, new.trial, low_us, us,
        high_us, new.us
      FROM forecast
      WHERE candidate = new.candidate AND new.kind = 'measured'
    ON CONFLICT DO UPDATE SET trial = new.trial, measured_us = new.us WHERE trial <> 'race' OR new.trial = 'race';
  UPDATE standing SET
    trial = new.trial, kind = new.kind, us = new.us, low_us = new.low_us, high_us = new.high_us
    WHERE candidate = new.candidate AND (trial IS NOT 'race' OR new.trial = 'race');
END;
CREATE TRIGGER rejection_counts AFTER INSERT ON rejection BEGIN
  INSERT INTO death SELECT run, arm, new.stage, new.reason, 1 FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
  UPDATE tally SET rejected = rejected + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET rejected = rejected + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate);
  UPDATE standing SET rejected = new.reason WHERE candidate = new.candidate;
END;
CREATE TRIGGER decision_counts AFTER INSERT ON decision WHEN new.what = 'promoted' AND new.candidate IS NOT NULL BEGIN
  UPDATE standing SET promoted = 1 WHERE candidate = new.candidate;
  UPDATE tally SET promoted = promoted + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET promoted = promoted + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate);
END;
";

/// Those that raced are ranked before the others; nobody asks for a hash.
const RACES: &str = "
CREATE INDEX standing_of_races ON standing (problem, device, kind, us) WHERE us IS NOT NULL AND trial = 'race';
DROP INDEX screening_by_ptx;
DROP INDEX screening_by_sass;
";

/// The one order of candidates, as `evolve::rank` has it: `grade` 2 won its second race, 1 raced, 0 has a short timing; then by time, which of
/// one that raced is its incumbent's over the ratio of its last race. What a candidate does on a held-out problem is no fault on its own.
const RANKS: &str = "
ALTER TABLE standing ADD COLUMN grade INTEGER NOT NULL DEFAULT 0;
CREATE VIEW race AS
  SELECT m.id, m.candidate, 1 + (m.trial = 'held_out' AND m.verdict = 'FASTER') AS grade,
      coalesce(i.us, m.us * m.ratio) / m.ratio AS us,
      coalesce(i.us, m.us * m.ratio) / max(m.ratio_high, m.ratio) AS low_us,
      coalesce(i.us, m.us * m.ratio) / iif(m.ratio_low > 0.0, m.ratio_low, m.ratio) AS high_us
    FROM measurement m JOIN standing s ON (s.candidate, s.problem) = (m.candidate, m.problem)
      LEFT JOIN standing i ON (i.candidate, i.problem, i.kind) = (m.incumbent, m.problem, m.kind)
    WHERE m.trial <> 'microbench' AND m.ratio > 0.0;
CREATE TRIGGER race_ranks AFTER UPDATE OF trial ON standing WHEN new.trial = 'race' BEGIN
  UPDATE standing SET grade = r.grade, us = r.us, low_us = r.low_us, high_us = r.high_us
    FROM (SELECT * FROM race WHERE candidate = new.candidate ORDER BY id DESC LIMIT 1) r WHERE standing.candidate = r.candidate;
END;
CREATE TRIGGER second_race_ranks AFTER INSERT ON measurement WHEN new.trial = 'held_out' BEGIN
  UPDATE standing SET grade = r.grade, us = r.us, low_us = r.low_us, high_us = r.high_us
    FROM (SELECT * FROM race WHERE candidate = new.candidate AND id = new.id) r
    WHERE standing.candidate = r.candidate AND standing.trial = 'race';
END;
UPDATE standing SET trial = trial WHERE trial = 'race';
DROP TRIGGER rejection_counts;
CREATE TRIGGER rejection_counts AFTER INSERT ON rejection BEGIN
  INSERT INTO death SELECT run, arm, new.stage, new.reason, 1 FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
  UPDATE tally SET rejected = rejected + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET rejected = rejected + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate);
  UPDATE standing SET rejected = new.reason WHERE candidate = new.candidate AND new.stage <> 'held_out';
END;
UPDATE standing SET rejected = (SELECT r.reason FROM rejection r WHERE r.candidate = standing.candidate AND r.stage <> 'held_out'
    ORDER BY r.id DESC LIMIT 1)
  WHERE candidate IN (SELECT candidate FROM rejection WHERE stage = 'held_out');
DROP INDEX standing_of_races;
DROP INDEX standing_by_time;
DROP INDEX standing_of_run;
CREATE INDEX standing_by_rank ON standing (problem, device, kind, grade DESC, us) WHERE us IS NOT NULL;
CREATE INDEX standing_of_run ON standing (run, problem, grade DESC, us) WHERE us IS NOT NULL;
";

/// Whoever counts candidates leaves out what they are compared with, in each stage and of each operator; each reason has an example. What a
/// run's page shows of its best is read of few pages of the file, as on a disk that is all that counts: the sound ones of an arm are found
/// without a look at the others, and an ancestor's short timing without one at its samples. So is what won a race.
const ARMS: &str = "
CREATE TABLE passage (
  run INTEGER NOT NULL,
  arm TEXT NOT NULL,
  stage TEXT NOT NULL,
  entered INTEGER NOT NULL,
  PRIMARY KEY (run, arm, stage)
) STRICT, WITHOUT ROWID;
INSERT INTO passage
  SELECT o.run, s.arm, o.stage, count(*) FROM outcome o JOIN standing s ON s.candidate = o.candidate GROUP BY o.run, s.arm, o.stage;
CREATE TRIGGER outcome_passes AFTER INSERT ON outcome BEGIN
  INSERT INTO passage SELECT new.run, arm, new.stage, 1 FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET entered = entered + 1;
END;

ALTER TABLE death ADD COLUMN latest INTEGER;
UPDATE death SET latest = l.rejection
  FROM (SELECT s.run, s.arm, r.stage, r.reason, max(r.id) AS rejection FROM rejection r JOIN standing s ON s.candidate = r.candidate
    GROUP BY s.run, s.arm, r.stage, r.reason) l
  WHERE (l.run, l.arm, l.stage, l.reason) = (death.run, death.arm, death.stage, death.reason);

UPDATE operator_tally SET
    candidates = operator_tally.candidates - c.candidates, timed = operator_tally.timed - c.timed, faster = operator_tally.faster - c.faster,
    promoted = operator_tally.promoted - c.promoted, rejected = operator_tally.rejected - c.rejected
  FROM (SELECT run, operator, count(*) AS candidates, count(us) AS timed,
      sum((SELECT count(*) FROM measurement m WHERE m.candidate = s.candidate AND m.trial <> 'held_out' AND m.verdict = 'FASTER')) AS faster,
      sum(promoted) AS promoted, sum((SELECT count(*) FROM rejection r WHERE r.candidate = s.candidate)) AS rejected
    FROM standing s WHERE arm NOT IN ('evolution', 'random') GROUP BY run, operator) c
  WHERE (c.run, c.operator) = (operator_tally.run, operator_tally.operator);
DELETE FROM operator_tally WHERE candidates = 0;

ALTER TABLE standing ADD COLUMN won INTEGER NOT NULL DEFAULT 0;
UPDATE standing SET won = 1 WHERE candidate IN (SELECT candidate FROM measurement WHERE verdict = 'FASTER' AND trial = 'race');
DROP TRIGGER candidate_counts;
CREATE TRIGGER candidate_counts AFTER INSERT ON candidate BEGIN
  INSERT INTO standing (candidate, run, problem, device, subject, arm, operator)
    VALUES (new.id, new.run, new.problem, (SELECT device FROM run WHERE id = new.run), new.subject, new.arm, new.operator);
  INSERT INTO tally (run, problem, arm, candidates) VALUES (new.run, new.problem, new.arm, 1)
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
  INSERT INTO operator_tally (run, operator, candidates) SELECT new.run, new.operator, 1 WHERE new.arm IN ('evolution', 'random')
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
END;
DROP TRIGGER measurement_counts;
CREATE TRIGGER measurement_counts AFTER INSERT ON measurement WHEN new.trial <> 'held_out' BEGIN
  UPDATE tally SET
    timed = timed + (SELECT us IS NULL FROM standing WHERE candidate = new.candidate),
    raced = raced + (new.trial = 'race')
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET
    timed = timed + (SELECT us IS NULL FROM standing WHERE candidate = new.candidate),
    faster = faster + (new.verdict IS 'FASTER'),
    gain = gain * iif(new.trial = 'race', 1.0, max(1.0, coalesce((SELECT p.us / new.us FROM progress p, standing s WHERE s.candidate = new.candidate
        AND (p.run, p.problem, p.trial, p.arm) = (s.run, s.problem, new.trial, s.arm) ORDER BY p.timed DESC LIMIT 1), 1.0)))
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
  INSERT INTO progress
    SELECT s.run, s.problem, new.trial, s.arm, iif(new.trial = 'race', t.raced, t.timed), t.candidates, new.at, new.candidate, new.us, new.low_us,
        new.high_us
      FROM standing s JOIN tally t ON (t.run, t.problem, t.arm) = (s.run, s.problem, s.arm)
      WHERE s.candidate = new.candidate AND new.us < coalesce((SELECT p.us FROM progress p
        WHERE (p.run, p.problem, p.trial, p.arm) = (s.run, s.problem, new.trial, s.arm) ORDER BY p.timed DESC LIMIT 1), 9e999)
    ON CONFLICT DO UPDATE SET
      candidate = excluded.candidate, at = excluded.at, us = excluded.us, low_us = excluded.low_us, high_us = excluded.high_us;
  INSERT INTO niche
    SELECT run, problem, bound, tile, 1, candidate, new.us FROM standing
      WHERE candidate = new.candidate AND arm IN ('baseline', 'evolution') AND bound IS NOT NULL AND tile IS NOT NULL
    ON CONFLICT DO UPDATE SET
      timed = timed + 1, candidate = iif(new.us < us, new.candidate, candidate), us = min(us, new.us);
  INSERT INTO pair
    SELECT author, device, id, (SELECT run FROM candidate WHERE id = new.candidate), new.candidate, new.trial, low_us, us,
        high_us, new.us
      FROM forecast
      WHERE candidate = new.candidate AND new.kind = 'measured'
    ON CONFLICT DO UPDATE SET trial = new.trial, measured_us = new.us WHERE trial <> 'race' OR new.trial = 'race';
  UPDATE standing SET won = 1 WHERE candidate = new.candidate AND new.trial = 'race' AND new.verdict = 'FASTER';
  UPDATE standing SET
    trial = new.trial, kind = new.kind, us = new.us, low_us = new.low_us, high_us = new.high_us
    WHERE candidate = new.candidate AND (trial IS NOT 'race' OR new.trial = 'race');
END;
DROP TRIGGER rejection_counts;
CREATE TRIGGER rejection_counts AFTER INSERT ON rejection BEGIN
  INSERT INTO death SELECT run, arm, new.stage, new.reason, 1, new.id FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET candidates = candidates + 1, latest = new.id;
  UPDATE tally SET rejected = rejected + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET rejected = rejected + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
  UPDATE standing SET rejected = new.reason WHERE candidate = new.candidate AND new.stage <> 'held_out';
END;
DROP TRIGGER decision_counts;
CREATE TRIGGER decision_counts AFTER INSERT ON decision WHEN new.what = 'promoted' AND new.candidate IS NOT NULL BEGIN
  UPDATE standing SET promoted = 1 WHERE candidate = new.candidate;
  UPDATE tally SET promoted = promoted + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET promoted = promoted + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
END;

DROP INDEX measurement_by_candidate;
CREATE INDEX measurement_by_candidate ON measurement (candidate, problem, trial, us);
DROP INDEX standing_by_rank;
DROP INDEX standing_of_run;
CREATE INDEX standing_by_rank ON standing (problem, device, kind, grade DESC, us)
  WHERE us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
CREATE INDEX standing_of_run ON standing (run, problem, arm, grade DESC, us)
  WHERE us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
CREATE INDEX standing_of_winners ON standing (device, problem, promoted DESC, grade DESC, us)
  WHERE won = 1 AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
";

/// A time that was taken over from an earlier run was not measured after the forecast: it says nothing of the forecaster.
///
/// Who is out holds no niche and is no corner of a curve: what it kept from being one takes its place. That is seldom, as few are timed
/// before they are found out; so a curve is drawn anew as a whole.
const FALLEN: &str = "
DELETE FROM pair WHERE trial = 'microbench' AND candidate IN (SELECT candidate FROM measurement WHERE length(samples) = 0);
DROP TRIGGER measurement_counts;
CREATE TRIGGER measurement_counts AFTER INSERT ON measurement WHEN new.trial <> 'held_out' BEGIN
  UPDATE tally SET
    timed = timed + (SELECT us IS NULL FROM standing WHERE candidate = new.candidate),
    raced = raced + (new.trial = 'race')
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET
    timed = timed + (SELECT us IS NULL FROM standing WHERE candidate = new.candidate),
    faster = faster + (new.verdict IS 'FASTER'),
    gain = gain * iif(new.trial = 'race', 1.0, max(1.0, coalesce((SELECT p.us / new.us FROM progress p, standing s WHERE s.candidate = new.candidate
        AND (p.run, p.problem, p.trial, p.arm) = (s.run, s.problem, new.trial, s.arm) ORDER BY p.timed DESC LIMIT 1), 1.0)))
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
  INSERT INTO progress
    SELECT s.run, s.problem, new.trial, s.arm, iif(new.trial = 'race', t.raced, t.timed), t.candidates, new.at, new.candidate, new.us, new.low_us,
        new.high_us
      FROM standing s JOIN tally t ON (t.run, t.problem, t.arm) = (s.run, s.problem, s.arm)
      WHERE s.candidate = new.candidate AND new.us < coalesce((SELECT p.us FROM progress p
        WHERE (p.run, p.problem, p.trial, p.arm) = (s.run, s.problem, new.trial, s.arm) ORDER BY p.timed DESC LIMIT 1), 9e999)
    ON CONFLICT DO UPDATE SET
      candidate = excluded.candidate, at = excluded.at, us = excluded.us, low_us = excluded.low_us, high_us = excluded.high_us;
  INSERT INTO niche
    SELECT run, problem, bound, tile, 1, candidate, new.us FROM standing
      WHERE candidate = new.candidate AND arm IN ('baseline', 'evolution') AND bound IS NOT NULL AND tile IS NOT NULL
    ON CONFLICT DO UPDATE SET
      timed = timed + 1, candidate = iif(new.us < us, new.candidate, candidate), us = min(us, new.us);
  INSERT INTO pair
    SELECT author, device, id, (SELECT run FROM candidate WHERE id = new.candidate), new.candidate, new.trial, low_us, us,
        high_us, new.us
      FROM forecast
      WHERE candidate = new.candidate AND new.kind = 'measured' AND length(new.samples) > 0
    ON CONFLICT DO UPDATE SET trial = new.trial, measured_us = new.us WHERE trial <> 'race' OR new.trial = 'race';
  UPDATE standing SET won = 1 WHERE candidate = new.candidate AND new.trial = 'race' AND new.verdict = 'FASTER';
  UPDATE standing SET
    trial = new.trial, kind = new.kind, us = new.us, low_us = new.low_us, high_us = new.high_us
    WHERE candidate = new.candidate AND (trial IS NOT 'race' OR new.trial = 'race');
END;

CREATE INDEX standing_of_niches ON standing (run, problem, bound, tile, us)
  WHERE us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
CREATE TRIGGER elite_falls AFTER UPDATE OF rejected ON standing
WHEN new.us IS NOT NULL AND new.rejected NOT IN ('slower', 'budget') AND new.candidate = (SELECT candidate FROM niche
    WHERE (run, problem, bound, tile) = (new.run, new.problem, new.bound, new.tile)) BEGIN
  UPDATE niche SET candidate = s.candidate, us = s.us
    FROM (SELECT candidate, us FROM standing
      WHERE run = new.run AND problem = new.problem AND bound = new.bound AND tile = new.tile AND arm IN ('baseline', 'evolution')
        AND us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'))
      ORDER BY us LIMIT 1) s
    WHERE (run, problem, bound, tile) = (new.run, new.problem, new.bound, new.tile);
  DELETE FROM niche WHERE (run, problem, bound, tile, candidate) = (new.run, new.problem, new.bound, new.tile, new.candidate);
END;
CREATE TRIGGER corner_falls AFTER UPDATE OF rejected ON standing
WHEN new.us IS NOT NULL AND new.rejected NOT IN ('slower', 'budget') AND EXISTS (SELECT 1 FROM progress
    WHERE run = new.run AND problem = new.problem AND arm = new.arm AND candidate = new.candidate) BEGIN
  DELETE FROM progress WHERE run = new.run AND problem = new.problem AND arm = new.arm;
  INSERT INTO progress
    SELECT new.run, new.problem, trial, new.arm, timed, candidates, at, candidate, us, low_us, high_us
      FROM (SELECT m.trial, m.at, m.candidate, m.us, m.low_us, m.high_us, s.is_sound,
          row_number() OVER told AS timed, max(s.made) OVER told AS candidates,
          min(iif(s.is_sound, m.us, NULL)) OVER (told ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS best
        FROM (SELECT c.id AS candidate, row_number() OVER (ORDER BY c.id) AS made,
              (k.rejected IS NULL OR k.rejected IN ('slower', 'budget')) AS is_sound
            FROM candidate c JOIN standing k ON k.candidate = c.id
            WHERE c.run = new.run AND c.problem = new.problem AND c.arm = new.arm) s
          JOIN measurement m ON m.candidate = s.candidate AND m.problem = new.problem AND m.trial IN ('microbench', 'race')
        WINDOW told AS (PARTITION BY m.trial ORDER BY m.id))
      WHERE is_sound AND us < coalesce(best, 9e999);
END;
UPDATE standing SET rejected = rejected WHERE us IS NOT NULL AND rejected NOT IN ('slower', 'budget');
";

/// Brings a ledger, or an empty file, to this version. To be called in a write transaction.
pub fn migrate(connection: &Connection) -> rusqlite::Result<()> {
    upgrade(connection, &MIGRATIONS)?;
    FACTS.into_iter().try_for_each(|table| keep(connection, table))
}

/// Makes a ledger of an earlier version of an empty file.
#[cfg(test)]
pub(super) fn begin_old(connection: &Connection, version: i64) -> rusqlite::Result<()> {
    upgrade(connection, &MIGRATIONS[..version as usize])?;
    FACTS.into_iter().try_for_each(|table| keep(connection, table))
}

fn upgrade(connection: &Connection, migrations: &[&str]) -> rusqlite::Result<()> {
    let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    for step in migrations.iter().skip(version.max(0) as usize) {
        connection.execute_batch(step)?;
    }
    connection.execute_batch(&format!(
        "PRAGMA user_version = {}; PRAGMA application_id = {APPLICATION_ID};",
        migrations.len()
    ))
}

/// Refuses every change of a table's rows.
fn keep(connection: &Connection, table: &str) -> rusqlite::Result<()> {
    for verb in ["UPDATE", "DELETE"] {
        connection.execute_batch(&format!(
            "CREATE TRIGGER IF NOT EXISTS {table}_no_{verb} BEFORE {verb} ON {table} BEGIN
               SELECT RAISE(ABORT, 'facts of the ledger are never changed');
             END;"
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_ledger_is_brought_forward_step_by_step() {
        let connection = Connection::open_in_memory().unwrap();
        let (first, second) =
            ("CREATE TABLE a (x);", "ALTER TABLE a ADD COLUMN y; INSERT INTO a VALUES (1, 2);");
        upgrade(&connection, &[first]).unwrap();
        upgrade(&connection, &[first, second]).unwrap();
        upgrade(&connection, &[first, second]).unwrap();
        let row: (i64, i64) = connection
            .query_row("SELECT count(*), (SELECT user_version FROM pragma_user_version) FROM a", [], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .unwrap();
        assert_eq!(row, (1, 2), "each step once");
    }

    /// Who raced in an older ledger is ranked by its last race, too, and what befell it elsewhere is no fault here.
    #[test]
    fn an_older_ledger_is_ranked() {
        let connection = Connection::open_in_memory().unwrap();
        upgrade(&connection, &MIGRATIONS[..2]).unwrap();
        let race = |trial: &str, problem: i64, us: f64, ratio: f64, verdict: &str| {
            format!(
                "INSERT INTO measurement (at, candidate, trial, kind, problem, samples, us, low_us, high_us, incumbent, ratio, ratio_low,
                   ratio_high, noise, verdict) VALUES (0, 2, '{trial}', 'measured', {problem}, x'', {us}, 1.0, 9.0, 1, {ratio}, {ratio} / 1.25,
                   {ratio} * 1.25, 1.0, '{verdict}');"
            )
        };
        let story = [
            "INSERT INTO problem VALUES (1, 'p'), (2, 'q'); INSERT INTO device VALUES (1, 'd'); INSERT INTO subject VALUES (1, 'h', 'b');
             INSERT INTO run VALUES (1, 0, 1, '{}', '{}', NULL);
             INSERT INTO candidate VALUES (1, 0, 1, 1, 1, 'baseline', 'a', '{}'), (2, 0, 1, 1, 1, 'evolution', 'b', '{}');
             INSERT INTO measurement (at, candidate, trial, kind, problem, samples, us, low_us, high_us)
               VALUES (0, 1, 'microbench', 'measured', 1, x'', 10.0, 9.0, 11.0), (0, 2, 'microbench', 'measured', 1, x'', 4.0, 3.0, 5.0);"
                .to_owned(),
            race("race", 1, 3.0, 2.0, "FASTER"),
            race("held_out", 1, 3.0, 1.25, "FASTER"),
            race("held_out", 2, 3.0, 0.5, "SLOWER"),
            "INSERT INTO rejection (at, candidate, stage, reason, detail) VALUES (0, 2, 'held_out', 'wrong', '')".to_owned(),
        ];
        story.iter().for_each(|facts| connection.execute_batch(facts).unwrap());
        migrate(&connection).unwrap();
        let row: String = connection
            .query_row(
                "SELECT concat_ws(' ', grade, us, low_us, high_us, coalesce(rejected, 'sound')) FROM standing WHERE candidate = 2",
                [],
                |row| row.get(0),
            )
            .unwrap();
        assert_eq!(row, "2 8.0 6.4 10.0 sound");
    }

    #[test]
    fn facts_are_never_changed() {
        let connection = Connection::open_in_memory().unwrap();
        migrate(&connection).unwrap();
        connection.pragma_update(None, "recursive_triggers", true).unwrap();
        connection.execute("INSERT INTO device (name) VALUES ('a')", []).unwrap();
        for change in
            ["UPDATE device SET name = 'b'", "DELETE FROM device", "REPLACE INTO device VALUES (1, 'b')"]
        {
            let refused = connection.execute(change, []).unwrap_err();
            assert!(refused.to_string().contains("never changed"), "{change}");
        }
    }
}
