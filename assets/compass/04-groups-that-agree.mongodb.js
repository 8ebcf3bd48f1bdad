// Which groups were all right or all wrong, and so taught nothing?
db.getCollection("audit_groups").aggregate([
  { $match: { split: "train", status: "completed", agreement: { $in: ["all right", "all wrong"] } } },
  { $sort: { agreement: 1, epoch: 1, order: 1 } },
  { $project: { _id: 1, agreement: 1, query: 1, answer: 1, scores: 1, outcome: 1, finalized_at: 1 } },
]).toArray();
