{{/* Names and parts that the templates have in common. */}}
{{- define "agentrl.name" -}}
{{- printf "%s-agentrl" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "agentrl.labels" -}}
app.kubernetes.io/name: agentrl
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Labels of the pods of one component: (list $ "sampler"). */}}
{{- define "agentrl.selector" -}}
app.kubernetes.io/name: agentrl
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* The image of one component: a tag, or a digest that begins with sha256. */}}
{{- define "agentrl.image" -}}
{{- $separator := ternary "@" ":" (hasPrefix "sha256:" .tag) -}}
{{- printf "%s%s%s" .repository $separator .tag -}}
{{- end -}}

{{- define "agentrl.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "agentrl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Environment: the connection string is a file, so that no variable holds a password. */}}
{{- define "agentrl.env" -}}
- {name: MONGO_URI_FILE, value: /secrets/uri}
- {name: TMPDIR, value: /tmp}
{{- end -}}

{{/* Mounts of a process: (list $ readsOutput). */}}
{{- define "agentrl.mounts" -}}
- {name: config, mountPath: /config, readOnly: true}
- {name: uri, mountPath: /secrets, readOnly: true}
- {name: data, mountPath: /data/models, subPath: models, readOnly: true}
- {name: data, mountPath: /data/tasks, subPath: tasks, readOnly: true}
- {name: output, mountPath: /output, readOnly: {{ index . 1 }}}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /data/logs, subPath: logs}
- {name: scratch, mountPath: /home/agentrl, subPath: home}
{{- end -}}

{{/* Volumes of a process: (list $ "sampler"). */}}
{{- define "agentrl.volumes" -}}
{{- $root := index . 0 -}}
- name: config
  configMap: {name: {{ include "agentrl.name" $root }}}
- name: uri
  secret:
    secretName: {{ index $root.Values.mongodb.secrets (index . 1) }}
    defaultMode: 0440
    items: [{key: {{ $root.Values.mongodb.uriKey }}, path: uri}]
- name: data
  persistentVolumeClaim: {claimName: {{ $root.Values.storage.data.existingClaim }}, readOnly: true}
- name: output
  persistentVolumeClaim: {claimName: {{ $root.Values.storage.output.existingClaim }}}
- name: scratch
  emptyDir: {}
{{- end -}}

{{/* The flags that every process of the run gets, as words of a YAML list. */}}
{{- define "agentrl.flags" -}}
- --config
- /config/run.yml
- --run_name
- {{ .Values.runName | quote }}
- --output_dir
- /output/{{ .Values.runName }}
- --log_dir
- /data/logs
{{- if .Values.mcpServers }}
- --mcp_servers_file
- /config/mcp_servers.yml
{{- end }}
{{- end -}}
