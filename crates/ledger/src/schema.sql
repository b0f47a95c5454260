-- The tables of a ledger, which `schema.rs` describes.

-- Facts. Triggers that `schema.rs` adds refuse every change of their rows.

CREATE TABLE problem (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS (row_checksum('problem', id, shape)) STORED,
  id INTEGER PRIMARY KEY,
  shape TEXT NOT NULL UNIQUE
) STRICT;

CREATE TABLE device (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS (row_checksum('device', id, name)) STORED,
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL UNIQUE
) STRICT;

CREATE TABLE subject (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS (row_checksum('subject', id, hash, body)) STORED,
  id INTEGER PRIMARY KEY,
  hash TEXT NOT NULL,
  body TEXT NOT NULL
) STRICT;
CREATE INDEX subject_by_hash ON subject (hash);

CREATE TABLE run (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('run', id, at, device, config, environment, price_per_hour)) STORED,
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  device INTEGER NOT NULL REFERENCES device,
  config TEXT NOT NULL,
  environment TEXT NOT NULL,
  price_per_hour REAL
) STRICT;

CREATE TABLE run_event (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS (row_checksum('run_event', id, at, run, event)) STORED,
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  run INTEGER NOT NULL REFERENCES run,
  event TEXT NOT NULL CHECK (event IN ('resumed', 'stopped', 'finished'))
) STRICT;
CREATE INDEX run_event_by_run ON run_event (run, id);

CREATE TABLE candidate (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('candidate', id, at, run, problem, subject, arm, operator, changes)) STORED,
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
  checksum INTEGER NOT NULL GENERATED ALWAYS AS (row_checksum('parent', candidate, position, parent)) STORED,
  candidate INTEGER NOT NULL REFERENCES candidate,
  position INTEGER NOT NULL,
  parent INTEGER NOT NULL REFERENCES candidate,
  PRIMARY KEY (candidate, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX parent_by_parent ON parent (parent);

CREATE TABLE outcome (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('outcome', id, at, run, candidate, stage, problem, seconds, device_seconds, finding)) STORED,
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  run INTEGER NOT NULL REFERENCES run,
  candidate INTEGER NOT NULL REFERENCES candidate,
  stage TEXT NOT NULL CHECK (stage IN ('propose', 'screen', 'check', 'microbench', 'race', 'held_out')),
  problem INTEGER NOT NULL REFERENCES problem,
  seconds REAL NOT NULL,
  device_seconds REAL NOT NULL,
  finding TEXT NOT NULL CHECK (finding IN ('screened', 'judged', 'timed', 'rejected')),
  UNIQUE (candidate, stage, problem)
) STRICT;
CREATE INDEX outcome_by_run ON outcome (run, id);

CREATE TABLE screening (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('screening', id, outcome, candidate, ptx_hash, sass_hash, registers, spill_bytes,
     shared_bytes, bound, tile, findings)) STORED,
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

CREATE TABLE forecast (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('forecast', id, at, outcome, candidate, hypothesis, author, device, problem, low_us, us,
     high_us)) STORED,
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
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('forecast_outcome', id, at, forecast, us, note)) STORED,
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  forecast INTEGER NOT NULL UNIQUE REFERENCES forecast,
  us REAL NOT NULL,
  note TEXT NOT NULL
) STRICT;

CREATE TABLE check_result (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('check_result', id, outcome, candidate, judge, verdict, reasons, hazards, error_rel,
     seconds)) STORED,
  id INTEGER PRIMARY KEY,
  outcome INTEGER REFERENCES outcome,
  candidate INTEGER NOT NULL REFERENCES candidate,
  judge TEXT NOT NULL CHECK (judge IN ('emulator', 'device')),
  verdict TEXT NOT NULL CHECK (verdict IN ('passed', 'incomplete', 'failed')),
  reasons TEXT NOT NULL,
  hazards TEXT NOT NULL,
  error_rel REAL,
  seconds REAL NOT NULL
) STRICT;
CREATE INDEX check_result_by_candidate ON check_result (candidate);

CREATE TABLE measurement (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('measurement', id, at, outcome, candidate, trial, kind, problem, samples, us, low_us,
     high_us, incumbent, ratio, ratio_low, ratio_high, noise, verdict)) STORED,
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
CREATE INDEX measurement_of_wins ON measurement (id) WHERE verdict = 'FASTER';
CREATE INDEX measurement_by_candidate ON measurement (candidate, problem, trial, us);

CREATE TABLE rejection (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('rejection', id, at, outcome, candidate, stage, reason, detail)) STORED,
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  outcome INTEGER REFERENCES outcome,
  candidate INTEGER NOT NULL REFERENCES candidate,
  stage TEXT NOT NULL CHECK (stage IN ('propose', 'screen', 'check', 'microbench', 'race', 'held_out')),
  reason TEXT NOT NULL,
  detail TEXT NOT NULL
) STRICT;
CREATE INDEX rejection_by_candidate ON rejection (candidate);

CREATE TABLE decision (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('decision', id, at, run, what, candidate, why)) STORED,
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  run INTEGER NOT NULL REFERENCES run,
  what TEXT NOT NULL,
  candidate INTEGER REFERENCES candidate,
  why TEXT NOT NULL
) STRICT;
CREATE INDEX decision_by_run ON decision (run, id);

CREATE TABLE spending (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('spending', id, at, run, what, device_seconds)) STORED,
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  run INTEGER NOT NULL REFERENCES run,
  what TEXT NOT NULL,
  device_seconds REAL NOT NULL
) STRICT;

CREATE TABLE recalibration (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('recalibration', id, at, author, device, slope, intercept, low, high, calibrated_on,
     held_out, adopted)) STORED,
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

-- Summaries, which the triggers below keep. Counts of candidates omit baselines and controls, by stage and by
-- operator. A page of a run reads few pages of the file: the indices of `standing` find the sound candidates
-- of an arm, and the winners, without a look at the others.

CREATE TABLE standing (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('standing', candidate, run, problem, device, subject, arm, operator, stage, bound, tile,
     passed, predicted_us, trial, kind, us, low_us, high_us, rejected, promoted, grade, won)) STORED,
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
  passed INTEGER NOT NULL DEFAULT 0,
  predicted_us REAL,
  trial TEXT,
  kind TEXT,
  us REAL,
  low_us REAL,
  high_us REAL,
  rejected TEXT,
  promoted INTEGER NOT NULL DEFAULT 0,
  grade INTEGER NOT NULL DEFAULT 0,
  won INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX standing_by_rank ON standing (problem, device, kind, grade DESC, us)
  WHERE us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
CREATE INDEX standing_of_run ON standing (run, problem, arm, grade DESC, us)
  WHERE us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
CREATE INDEX standing_of_winners ON standing (device, problem, promoted DESC, grade DESC, us)
  WHERE won = 1 AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
CREATE INDEX standing_of_niches ON standing (run, problem, bound, tile, us)
  WHERE us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'));

CREATE TABLE tally (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('tally', run, problem, arm, candidates, screened, passed, timed, raced, rejected, promoted))
     STORED,
  run INTEGER NOT NULL,
  problem INTEGER NOT NULL,
  arm TEXT NOT NULL,
  candidates INTEGER NOT NULL DEFAULT 0,
  screened INTEGER NOT NULL DEFAULT 0,
  passed INTEGER NOT NULL DEFAULT 0,
  timed INTEGER NOT NULL DEFAULT 0,
  raced INTEGER NOT NULL DEFAULT 0,
  rejected INTEGER NOT NULL DEFAULT 0,
  promoted INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (run, problem, arm)
) STRICT, WITHOUT ROWID;

CREATE TABLE operator_tally (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('operator_tally', run, operator, candidates, timed, faster, promoted, rejected, gain))
     STORED,
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
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('death', run, arm, stage, reason, candidates, latest)) STORED,
  run INTEGER NOT NULL,
  arm TEXT NOT NULL,
  stage TEXT NOT NULL,
  reason TEXT NOT NULL,
  candidates INTEGER NOT NULL,
  latest INTEGER,
  PRIMARY KEY (run, arm, stage, reason)
) STRICT, WITHOUT ROWID;

CREATE TABLE passage (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS (row_checksum('passage', run, arm, stage, entered)) STORED,
  run INTEGER NOT NULL,
  arm TEXT NOT NULL,
  stage TEXT NOT NULL,
  entered INTEGER NOT NULL,
  PRIMARY KEY (run, arm, stage)
) STRICT, WITHOUT ROWID;

CREATE TABLE cost (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('cost', run, what, tasks, seconds, device_seconds)) STORED,
  run INTEGER NOT NULL,
  what TEXT NOT NULL,
  tasks INTEGER NOT NULL,
  seconds REAL NOT NULL,
  device_seconds REAL NOT NULL,
  PRIMARY KEY (run, what)
) STRICT, WITHOUT ROWID;

CREATE TABLE progress (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('progress', run, problem, trial, arm, timed, candidates, at, candidate, us, low_us,
     high_us)) STORED,
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
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('niche', run, problem, bound, tile, timed, candidate, us)) STORED,
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
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('pair', author, device, forecast, run, candidate, trial, low_us, us, high_us, measured_us))
     STORED,
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

-- The order of candidates, as in `evolve::rank`: `grade` 2 won its second race, 1 raced, 0 has a short timing;
-- then by time. The time of a candidate that raced is its incumbent's divided by the ratio of its last race.
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

CREATE TRIGGER candidate_counts AFTER INSERT ON candidate BEGIN
  INSERT INTO standing (candidate, run, problem, device, subject, arm, operator)
    VALUES (new.id, new.run, new.problem, (SELECT device FROM run WHERE id = new.run), new.subject, new.arm, new.operator);
  INSERT INTO tally (run, problem, arm, candidates) VALUES (new.run, new.problem, new.arm, 1)
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
  INSERT INTO operator_tally (run, operator, candidates) SELECT new.run, new.operator, 1 WHERE new.arm IN ('evolution', 'random')
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
END;

CREATE TRIGGER decision_counts AFTER INSERT ON decision WHEN new.what = 'promoted' AND new.candidate IS NOT NULL BEGIN
  UPDATE standing SET promoted = 1 WHERE candidate = new.candidate;
  UPDATE tally SET promoted = promoted + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET promoted = promoted + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
END;

-- A time that was taken over from an earlier run has no samples. It was not measured after the forecast, so it
-- makes no pair.
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

-- A rejected candidate holds no niche and is no corner of a progress curve: the next best one takes its place.
-- Few candidates are rejected after they were timed, so the whole curve is computed again.
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

CREATE TRIGGER check_result_counts AFTER INSERT ON check_result
WHEN new.verdict = 'passed' AND (SELECT passed FROM standing WHERE candidate = new.candidate) = 0 BEGIN
  UPDATE standing SET passed = 1 WHERE candidate = new.candidate;
  UPDATE tally SET passed = passed + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
END;

CREATE TRIGGER outcome_counts AFTER INSERT ON outcome BEGIN
  UPDATE standing SET stage = new.stage WHERE candidate = new.candidate;
  INSERT INTO cost VALUES (new.run, new.stage, 1, new.seconds, new.device_seconds)
    ON CONFLICT DO UPDATE SET
      tasks = tasks + 1, seconds = seconds + new.seconds, device_seconds = device_seconds + new.device_seconds;
END;

CREATE TRIGGER outcome_passes AFTER INSERT ON outcome BEGIN
  INSERT INTO passage SELECT new.run, arm, new.stage, 1 FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET entered = entered + 1;
END;

-- What a candidate does on a held-out problem is no fault by itself.
CREATE TRIGGER rejection_counts AFTER INSERT ON rejection BEGIN
  INSERT INTO death SELECT run, arm, new.stage, new.reason, 1, new.id FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET candidates = candidates + 1, latest = new.id;
  UPDATE tally SET rejected = rejected + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET rejected = rejected + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
  UPDATE standing SET rejected = new.reason WHERE candidate = new.candidate AND new.stage <> 'held_out';
END;
