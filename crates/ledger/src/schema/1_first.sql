-- What a ledger of the first version is.

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
